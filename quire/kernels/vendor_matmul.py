"""The vendor's matmul where it is as exact as ours: same sum, same order, same bits.

cuBLAS without split-k sums each output as one chain of fp32 matrix-unit additions over increasing
k, which is what `matmul_kernel.py` does, so for bf16 and fp16 its bits are ours for any number of
rows; with split-k, its default, they follow the batch size. That is a property of the library we
run with, not a promise of its makers: `agrees` compares the two on the weights' own shapes before
a model relies on it, and a GPU test sweeps many more. It is faster than our tiles beyond 64 rows or
so, and much slower on some shapes below.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.matmul_configs import SMALL, fits_one_round, rounds_of
from quire.kernels.rehearsal import rehearsal

__all__ = ["agrees", "forbid_split_k", "is_faster", "vendor_matmul"]

_CHECKED_ROWS = (72, 200, 520, 2048)
_CHECKED_IF_DEEP = (24, 48)
# For narrower or ragged weights and for misaligned rows the library uses older kernels at some
# sizes, which sum in another order.
_LEAST_ROWS, _ROW_UNIT = 512, 64


def is_faster(m: int, n: int, k: int, gated: bool, units: int) -> bool:
    """Whether the library is faster, as measured on an H200 (`benchmarks/gpu_matmul.py`). `units`:
    multiprocessors."""
    if gated and 192 < m <= 256 and _gate_pays(m, n, units):
        return False
    if m > 128:
        return True
    if m > 64:
        return n * k > SMALL or not fits_one_round(m, n, units)
    # On Hopper most weights stream up to 32 rows of x and some up to 256 (`stream_configs.py`).
    # Those never get here.
    return m > 16 and not gated and _is_deep(n, k)


def _is_deep(n: int, k: int) -> bool:
    """Whether sums are long and so few that our tiles leave half of the chip idle.

    The library has narrower tiles. Below 4,096 weight rows none of them is quick."""
    return n >= 4096 and k >= 3 * n


def _gate_pays(m: int, n: int, units: int) -> bool:
    """Whether our kernel wins because it applies the gate itself and so saves a pass.

    It does for small products, and for large ones if two rows of tiles leave little of the chip
    idle."""
    rounds, full = rounds_of(m, n, units)
    return rounds < 1 or (m > 224 and full / rounds > 0.8)


def forbid_split_k() -> None:
    """Forbid split-k in the whole process: torch has no finer switch."""
    if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    settings.allow_fp16_reduced_precision_reduction = (False, False)


def vendor_matmul(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x [m, k] @ w [n, k].T + bias -> out."""
    if bias is None:
        return torch.mm(x, w.t(), out=out)
    return torch.addmm(bias, x, w.t(), out=out)


def _spread(rows: int, w: Tensor, random: torch.Generator) -> Tensor:
    """Inputs for w over several orders of magnitude.

    A different order of additions then changes the rounding often enough to show even in a narrow
    product."""
    x = torch.empty(rows, w.shape[1], dtype=w.dtype, device=w.device)
    scale = torch.empty_like(x).normal_(generator=random).exp_()
    return x.normal_(generator=random).mul_(scale)


def agrees(w: Tensor, bias: Tensor | None, ours: Callable[[Tensor], Tensor]) -> bool:
    """Whether the library gives the bits of `ours` for this weight at a few batch sizes."""
    n, k = w.shape
    if w.dtype not in (torch.bfloat16, torch.float16):
        return False
    if n < _LEAST_ROWS or n % _ROW_UNIT or k % _ROW_UNIT:
        return False
    forbid_split_k()
    random = torch.Generator(w.device).manual_seed(0)
    checked = (*_CHECKED_IF_DEEP, *_CHECKED_ROWS) if _is_deep(n, k) else _CHECKED_ROWS
    inputs = [_spread(rows, w, random) for rows in checked]
    if w.is_cuda:
        with rehearsal():
            for x in inputs:
                ours(x)
    for x in inputs:
        out = torch.empty(len(x), n, dtype=w.dtype, device=w.device)
        if not torch.equal(vendor_matmul(x, w, bias, out), ours(x)):
            return False
    return True

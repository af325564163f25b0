"""EightBitJoints: inputs of W8A8 products rounded by the kernel that makes them.

A norm writes codes and scales instead of floats; of many rows the library makes gate and up, and
the gate rounds what it makes for `down`. The bits are those of separate launches. That is compared
on the device when a model is loaded; where it is not so, the launches stay apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.rehearsal import rehearsal
from quire.kernels.rms_norm import rms_norm
from quire.kernels.rms_norm_round import rms_norm_round
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.silu_mul_round import silu_mul_round
from quire.nn.ops import LinearKernel, NormedKernel
from quire.ops.eight_bit_linear import EightBitLinear
from quire.ops.packed_check import failure_of

_CHECKED_ROWS = (1, 7, 130)
Made = tuple[Tensor, ...]
Both = tuple[Callable[[], Made], Callable[[], Made]]  # apart and joined


class RoundedKernel(LinearKernel, Protocol):
    """A kernel that rounds its inputs first, and takes them rounded too."""

    rounding: Rounding

    def multiply(self, x: RoundedRows, dtype: torch.dtype) -> Tensor: ...


class EightBitPair:
    """A gated product, and the product of what it makes."""

    def __init__(self, up: EightBitLinear, down: EightBitLinear) -> None:
        self.up, self.down, self.rounding = up, down, up.rounding

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(round_inputs(x, self.rounding), x.dtype)

    def multiply(self, x: RoundedRows, dtype: torch.dtype) -> Tensor:
        return self.down.multiply(self.up.rounded(x, dtype, self.down.rounding), dtype)


class NormedProduct:
    """`NormedKernel`: a norm that rounds, and a product of what it makes."""

    def __init__(self, kernel: RoundedKernel, weight: Tensor, eps: float) -> None:
        self.kernel, self.weight, self.eps = kernel, weight, eps

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, stream = rms_norm_round(x, self.weight, self.eps, self.kernel.rounding, residual)
        return self.kernel.multiply(rows, x.dtype), stream


class EightBitJoints:
    """`nn.ops.Joints`, shared by the layers of a model: a kind of launch is checked once."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of the model."""
        self.dtype = dtype
        self.apart: dict[str, str] = {}  # what stays separate launches, and why
        self._verdicts: dict[object, str | None] = {}

    def normed(self, kernel: LinearKernel, weight: Tensor, eps: float) -> NormedKernel | None:
        if not isinstance(kernel, (EightBitLinear, EightBitPair)) or kernel.rounding.group:
            return None
        rounding = kernel.rounding
        key = ("norms", len(weight), weight.dtype, _kind(rounding))
        check = partial(norm_difference, weight, eps, rounding, self.dtype)
        return NormedProduct(kernel, weight, eps) if self._holds(key, check) else None

    def chained(self, first: LinearKernel, second: LinearKernel) -> LinearKernel | None:
        if not isinstance(first, EightBitLinear) or not isinstance(second, EightBitLinear):
            return None
        gate, rounding = first.gate, second.rounding
        if gate is None or first.library is None or rounding.group:
            return None
        width = second.weight.shape[1]
        key = ("gates", width, gate, _kind(rounding))
        check = partial(gate_difference, width, gate, rounding, first.weight.codes.device)
        return EightBitPair(first, second) if self._holds(key, check) else None

    def _holds(self, key: tuple[object, ...], check: Callable[[], str | None]) -> bool:
        if key not in self._verdicts:
            why = self._verdicts[key] = failure_of(check)
            if why is not None:
                self._leave(str(key[0]), why)
        return self._verdicts[key] is None

    def _leave(self, what: str, why: str) -> None:
        if what in self.apart:
            return
        self.apart[what] = why
        warnings.warn(
            f"{what} do not round what they make: their kernel fails here ({why}); that is slower,"
            " the results are the same",
            RuntimeWarning,
            stacklevel=2,
        )


def _kind(rounding: Rounding) -> tuple[object, ...]:
    return rounding.dtype, rounding.scale is None


def norm_difference(
    weight: Tensor, eps: float, rounding: Rounding, dtype: torch.dtype
) -> str | None:
    """What is wrong with a norm that rounds."""
    x, residual = (_spread(len(weight), dtype, weight.device, seed) for seed in (0, 1))

    def apart(rows: int, other: Tensor | None) -> Made:
        normed, stream = rms_norm(x[:rows], weight, eps, other)
        return *round_inputs(normed, rounding), stream

    def joint(rows: int, other: Tensor | None) -> Made:
        codes, stream = rms_norm_round(x[:rows], weight, eps, rounding, other)
        return *codes, stream

    cases = [(rows, other) for rows in _CHECKED_ROWS for other in (None, residual[:rows])]
    ways: list[Both] = [(partial(apart, *case), partial(joint, *case)) for case in cases]
    return None if _are_equal(ways, x.is_cuda) else "rounded norms differ"


def gate_difference(width: int, gate: str, rounding: Rounding, device: torch.device) -> str | None:
    """What is wrong with a gate that rounds, of the library's products, which are bf16."""
    pairs = _spread(2 * width, torch.bfloat16, device, 0)

    def apart(rows: int) -> Made:
        return round_inputs(silu_mul(pairs[:rows], gate, interleaved=True), rounding)

    def joint(rows: int) -> Made:
        return silu_mul_round(pairs[:rows], rounding, gate)

    ways: list[Both] = [(partial(apart, rows), partial(joint, rows)) for rows in _CHECKED_ROWS]
    return None if _are_equal(ways, pairs.is_cuda) else "rounded gates differ"


def _are_equal(ways: list[Both], on_gpu: bool) -> bool:
    if on_gpu:
        with rehearsal():
            for apart, joint in ways:
                apart()
                joint()
    pairs = [pair for apart, joint in ways for pair in zip(apart(), joint(), strict=True)]
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(made: Tensor) -> Tensor:
    return made.view(torch.uint8) if made.itemsize == 1 else made


def _spread(width: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Rows over several orders of magnitude; one of zeros."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(_CHECKED_ROWS[-1], width, generator=random, device=device)
    x *= torch.randn(x.shape, generator=random, device=device).exp()
    x[3] = 0.0
    return x.to(dtype)

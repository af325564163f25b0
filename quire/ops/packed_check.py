"""Whether packed kernels may be used on the device at hand: asked once for every form, at load.

Kernels are compiled when they are first called, by whatever compiler is installed, for whatever
chip there is. So some rows of the very weight are multiplied packed and expanded. One different bit
or an error keeps the form expanded, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.kernels.expand import expand
from quire.kernels.failures import FAILURES
from quire.kernels.matmul import interleave, matmul
from quire.kernels.packed_matmul import packed_matmul
from quire.kernels.slabs import Slabs
from quire.ops.packed_linear import stream, streamed
from quire.ops.slabs_of import slabs_of
from quire.quant.weight import Weight

_WEIGHT_ROWS = 192
_ROWS = (1, 16, 17, 33, 100, 129)  # of x: every tile of `packed_matmul.pick_packed`


def failure_of(check: Callable[[], str | None]) -> str | None:
    """What a check finds, or the error it ends in."""
    try:
        return check()
    except FAILURES as error:
        return " ".join((type(error).__name__, *str(error).strip().splitlines()[-1:]))


def why_not(
    weight: Weight, gate: str | None, dtype: torch.dtype, streams: bool = False
) -> str | None:
    """None: packed products of this form have the bits of expanded ones. `streams`: those of the
    streaming kernels where one takes the form."""
    return failure_of(lambda: _difference(weight, gate, dtype, streams))


def _difference(weight: Weight, gate: str | None, dtype: torch.dtype, streams: bool) -> str | None:
    some = weight.pick(_few_rows(weight.shape[0], gate is not None))
    slabs = slabs_of(some, gate is not None, dtype if streams else None)
    assert slabs is not None, "no such kernel"
    dense = _expanded(some, slabs, dtype)
    if not torch.equal(expand(slabs, torch.empty_like(dense)), dense):
        return "expanded weights differ"
    random = torch.Generator(dense.device).manual_seed(0)
    for rows in _ROWS:
        x = torch.randn(rows, dense.shape[1], generator=random, device=dense.device).to(dtype)
        want = matmul(x, dense, gate=gate)
        for way, product in _products(x, slabs, gate):
            if not torch.equal(product, want):
                return f"products of {rows} rows{way} differ"
    return None


def _products(
    x: torch.Tensor, slabs: Slabs, gate: str | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of every kernel that can: which one the engine takes depends on the whole weight's rows."""
    product = streamed(slabs, None, gate)
    if product is None:
        yield "", packed_matmul(x, slabs, gate=gate)
        return
    for config in product.ways(len(x)):
        yield " in turns" if config.in_turns else "", stream(product, x, config=config)


def _few_rows(num_rows: int, paired: bool) -> slice | torch.Tensor:
    if not paired:
        return slice(0, min(num_rows, _WEIGHT_ROWS))
    half = torch.arange(min(num_rows // 2, _WEIGHT_ROWS // 2))
    return torch.cat((half, half + num_rows // 2))


def _expanded(weight: Weight, slabs: Slabs, dtype: torch.dtype) -> torch.Tensor:
    dense = weight.dequantize().to(dtype)
    dense = dense if slabs.order is None else dense[:, slabs.order]
    return (interleave(dense) if slabs.paired else dense).contiguous()

"""Linear: a shape, weights in whatever form they were stored, and a kernel slot.

The slot is filled once the weights are loaded, by the table of the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.dist.cuts import Cut
from quire.nn.ops import LinearKernel, Ops
from quire.nn.parameter import Kept, Parameter


class Linear:
    """y = x @ weight.T + bias with a fused weight of one or several parts (q|k|v, gate|up).

    Of a part that is a `Cut`, only those outputs are computed here; other ranks have the rest."""

    def __init__(
        self,
        num_in: int,
        parts: Mapping[str, int | Cut],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        cuts = {n: c if isinstance(c, Cut) else Cut.whole(c) for n, c in parts.items()}
        kept = None if all(cut.is_whole for cut in cuts.values()) else Kept(cuts)
        self.parts = {name: cut.size for name, cut in cuts.items()}
        places, begin = {}, 0
        for name, size in self.parts.items():
            places[name] = slice(begin, begin + size)
            begin += size
        self.weight = Parameter((begin, num_in), dtype, device, places, True, kept)
        self.bias = Parameter((begin,), dtype, device, places, kept=kept) if bias else None
        self.kernel: LinearKernel | None = None

    def finish(self, ops: Ops, gate: str | None = None) -> None:
        """Weights are in: choose the kernel and let go of what it does not need."""
        bias = None if self.bias is None else self.bias.tensor
        self.kernel = ops.linear(self.weight.weights(), bias, gate)
        self.weight.release()
        if self.bias is not None:
            self.bias.release()

    def reorder(self, part: str, rows: Tensor) -> None:
        """Give a part's outputs another order."""
        self.weight.reorder(part, rows)
        if self.bias is not None:
            self.bias.reorder(part, rows)

    def __call__(self, x: Tensor) -> Tensor:
        assert self.kernel is not None, "Linear used before its weight was loaded"
        return self.kernel(x)

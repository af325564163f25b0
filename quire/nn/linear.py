"""Linear: a shape, weights in whatever form they were stored, and a kernel slot.

The slot is filled once the weights are loaded, by the table of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from quire.dist.cuts import Cut
from quire.dist.homes import Homes
from quire.nn.ops import GatedKernel, GateForm, LinearKernel, Ops
from quire.nn.parameter import Kept, Parameter


class Adapted(Protocol):
    """The adapters of a step's rows; `lora/step.py` has them."""

    def multiply(self, linear: Linear, x: Tensor) -> Tensor:
        """What the linear makes of x, with what each row's adapter adds before the gate."""
        ...

    def of_tail(self) -> Adapted:
        """Of the rows that a step's tail keeps."""
        ...

    def of_own(self, homes: Homes) -> Adapted:
        """Of a rank's own rows; they have no tail."""
        ...


class Linear:
    """y = x @ weight.T + bias with a fused weight of one or several parts (q|k|v, gate|up).

    Of a part that is a `Cut`, only those outputs are computed here; other ranks have the rest. Of
    inputs that are a `Cut`, only those are multiplied; somebody must add what other ranks have."""

    def __init__(
        self,
        num_in: int | Cut,
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
        weight = kept
        if isinstance(num_in, Cut):
            assert kept is None, "either outputs are shared out or inputs"
            weight, num_in = Kept({}, columns=num_in), num_in.size
        self.weight = Parameter((begin, num_in), dtype, device, places, True, weight)
        self.bias = Parameter((begin,), dtype, device, places, kept=kept) if bias else None
        self.kernel: LinearKernel | None = None
        self.gate: GateForm | None = None
        self.ops: Ops | None = None

    def finish(self, ops: Ops, gate: str | None = None) -> None:
        """Weights are in: choose the kernel and let go of what it does not need."""
        self.ops, self.gate = ops, None if gate is None else GateForm(gate)
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

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        assert self.kernel is not None, "Linear used before its weight was loaded"
        return self.kernel(x) if adapted is None else adapted.multiply(self, x)

    def changed(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The product of x, changed before the gate. On devices where it can be had alone."""
        assert self.kernel is not None and self.ops is not None
        if self.gate is None:
            return change(self.kernel(x))
        product = cast("GatedKernel", self.kernel).kernel
        return self.ops.gate(change(product(x)), self.gate)

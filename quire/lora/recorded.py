"""RecordedAdapters: adapters as recorded steps find them, in a table for each Linear.

A tape is recorded once, for whatever adapters come and go later: its operations read the slot of
each row from the step, and what that slot adds from the tables here. `runner/tapes.py` records.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from quire.dist.homes import Homes
from quire.lora.folder import MAX_RANK
from quire.lora.placed import Adapter, Delta, linears_of
from quire.models.decoder import Decoder
from quire.native.adapt import AdapterTable, Expand
from quire.native.linear import NativeLinear
from quire.native.panels import Panels
from quire.native.tape import Rows
from quire.nn.linear import Linear
from quire.nn.ops import LinearKernel


class RecordedAdapters:
    """`nn.linear.Adapted`, for a recording."""

    def __init__(self, model: Decoder, num_slots: int) -> None:
        self._tables = {
            linear: AdapterTable(num_slots, len(linear.parts) * MAX_RANK, len(linear.parts))
            for linear in linears_of(model).values()
        }

    def put(self, adapter: Adapter) -> None:
        for linear, delta in adapter.deltas.items():
            self._tables[linear].put(adapter.slot, _panels(delta.shrink), _expands(delta))

    def drop(self, adapter: Adapter) -> None:
        for linear in adapter.deltas:
            self._tables[linear].drop(adapter.slot)

    def multiply(self, linear: Linear, x: Tensor) -> Tensor:
        return linear.changed(x, lambda y: self._record(linear, x, y))

    def _record(self, linear: Linear, x: Tensor, y: Tensor) -> Tensor:
        self._tables[linear].record(cast("Any", x), cast("Any", y))
        assert isinstance(y, Rows)
        return y

    def of_tail(self) -> RecordedAdapters:
        return self

    def of_own(self, homes: Homes) -> RecordedAdapters:
        return self


def _expands(delta: Delta) -> list[Expand]:
    return [
        Expand(_panels(part.expand), part.outputs.start, part.inputs.start, part.scale)
        for part in delta.parts
    ]


def _panels(kernel: LinearKernel) -> Panels:
    assert isinstance(kernel, NativeLinear), "a recorded step without native kernels"
    (panels,) = kernel.parts
    return panels

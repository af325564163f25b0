"""AdapterBank: the adapters whose weights are in memory, by number.

It reads what it is told to read and forgets what it is told to forget; who that is, `adapters.py`
decides. Each has a slot in the tables of recorded steps, where the engine records any, or in those
of a GPU. Copies of those that made room are in the form of the slots: on a CPU they are what the
slots had, of a GPU's memory they are in pinned memory of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from quire.lora.adapters import Facts
from quire.lora.folder import read_adapter
from quire.lora.placed import Adapter, check_model, fitted, place
from quire.lora.recorded import RecordedAdapters
from quire.lora.row_tiles import RowTiles
from quire.lora.step import Numbers, StepAdapters
from quire.models.decoder import Decoder
from quire.models.names import Target
from quire.ops.native_ops import NativeOps

if TYPE_CHECKING:
    from quire.lora.on_gpu import GpuAdapters, Held


class Copy(NamedTuple):
    adapter: Adapter
    held: Held | None  # of one on a GPU


class AdapterBank:
    """`lora.adapters.Bank`."""

    def __init__(self, model: Decoder, names: Mapping[str, Target], num_slots: int) -> None:
        """`names`: Hugging Face's of the model's tensors."""
        self._model, self._names = model, names
        self._adapters: dict[int, Adapter] = {}
        self._copies: dict[int, Copy] = {}
        self._free = list(range(num_slots, 0, -1))
        self.recorded: RecordedAdapters | None = None
        if isinstance(model.ops, NativeOps):
            self.recorded = RecordedAdapters(model, num_slots)
        self.on_gpu: GpuAdapters | None = None
        if model.device.type == "cuda":
            from quire.lora.on_gpu import GpuAdapters  # CPU installs need no triton

            self.on_gpu = GpuAdapters(model, num_slots)
        self.on_first: Callable[[], None] | None = None  # set by the engine; called once

    def put(self, number: int, path: str) -> Facts:
        """Read a folder. Raises CheckpointError, NotSupported or Overloaded."""
        check_model(self._model)
        slot = self._free[-1]
        with torch.inference_mode():
            folder = read_adapter(path, pinned=self._model.device.type == "cuda")
            found = fitted(folder, self._model, self._names)
            if self.on_gpu is not None:
                num_bytes = self.on_gpu.put(slot, found)
                adapter = Adapter({}, folder.digest, folder.rank, num_bytes, slot)
            else:
                adapter = place(folder, self._model, found)._replace(slot=slot)
        self._take_slot(number, adapter)
        if self.on_first is not None:
            self.on_first()
            self.on_first = None
        return Facts(adapter.digest, adapter.rank, adapter.num_bytes)

    def _take_slot(self, number: int, adapter: Adapter) -> None:
        self._adapters[number] = adapter
        self._free.remove(adapter.slot)
        if self.recorded is not None:
            self.recorded.put(adapter)

    def drop(self, number: int) -> None:
        adapter = self._adapters.pop(number)
        self._free.append(adapter.slot)
        if self.recorded is not None:
            self.recorded.drop(adapter)
        if self.on_gpu is not None:
            self.on_gpu.drop(adapter.slot)

    def save(self, number: int) -> None:
        adapter = self._adapters[number]
        with torch.inference_mode():
            held = None if self.on_gpu is None else self.on_gpu.copy_of(adapter.slot)
        self._copies[number] = Copy(adapter, held)

    def restore(self, number: int) -> None:
        """Raises Overloaded."""
        adapter, held = self._copies[number]
        slot = self._free[-1]
        if self.on_gpu is not None:
            assert held is not None, "a copy of no GPU's memory"
            with torch.inference_mode():
                self.on_gpu.restore(slot, held)
        self._take_slot(number, adapter._replace(slot=slot))

    def forget(self, number: int) -> None:
        del self._copies[number]

    def step(self, rows: Numbers, drawn: Numbers) -> StepAdapters:
        """The adapter of each row of a step, and of each that a token is drawn from; 0: none."""
        return StepAdapters(self._adapters, rows, drawn)

    def tiles(self, rows: Numbers) -> RowTiles:
        """Rows of a step sorted by their adapters, for a GPU."""
        numbers, places = np.unique(rows, return_inverse=True)
        slots = [self._adapters[number].slot if number else 0 for number in numbers.tolist()]
        return RowTiles.of(np.asarray(slots, dtype=np.int64)[places])

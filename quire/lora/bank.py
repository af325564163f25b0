"""AdapterBank: the adapters whose weights are in memory, by number.

It reads what it is told to read and forgets what it is told to forget; who that is, `adapters.py`
decides. Each has a slot in the tables of recorded steps, where the engine records any.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.lora.adapters import Facts
from quire.lora.folder import read_adapter
from quire.lora.placed import Adapter, check_model, place
from quire.lora.recorded import RecordedAdapters
from quire.lora.step import Numbers, StepAdapters
from quire.models.decoder import Decoder
from quire.models.names import Target
from quire.ops.native_ops import NativeOps


class AdapterBank:
    """`lora.adapters.Bank`."""

    def __init__(self, model: Decoder, names: Mapping[str, Target], num_slots: int) -> None:
        """`names`: Hugging Face's of the model's tensors."""
        self._model, self._names = model, names
        self._adapters: dict[int, Adapter] = {}
        self._free = list(range(num_slots, 0, -1))
        self.recorded: RecordedAdapters | None = None
        if isinstance(model.ops, NativeOps):
            self.recorded = RecordedAdapters(model, num_slots)

    def put(self, number: int, path: str) -> Facts:
        """Read a folder. Raises CheckpointError or NotSupported."""
        check_model(self._model)
        with torch.inference_mode():
            placed = place(read_adapter(path), self._model, self._names)
        self._adapters[number] = adapter = placed._replace(slot=self._free.pop())
        if self.recorded is not None:
            self.recorded.put(adapter)
        return Facts(adapter.digest, adapter.rank, adapter.num_bytes)

    def drop(self, number: int) -> None:
        adapter = self._adapters.pop(number)
        self._free.append(adapter.slot)
        if self.recorded is not None:
            self.recorded.drop(adapter)

    def step(self, rows: Numbers, drawn: Numbers) -> StepAdapters:
        """The adapter of each row of a step, and of each that a token is drawn from; 0: none."""
        return StepAdapters(self._adapters, rows, drawn)

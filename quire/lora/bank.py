"""AdapterBank: the adapters whose weights are in memory, by number.

It reads what it is told to read and forgets what it is told to forget; who that is, `adapters.py`
decides.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.lora.adapters import Facts
from quire.lora.folder import read_adapter
from quire.lora.placed import Adapter, place
from quire.lora.step import Numbers, StepAdapters
from quire.models.decoder import Decoder
from quire.models.names import Target


class AdapterBank:
    """`lora.adapters.Bank`."""

    def __init__(self, model: Decoder, names: Mapping[str, Target], max_rank: int) -> None:
        """`names`: Hugging Face's of the model's tensors."""
        self._model, self._names, self._max_rank = model, names, max_rank
        self._adapters: dict[int, Adapter] = {}

    def put(self, number: int, path: str) -> Facts:
        """Read a folder. Raises CheckpointError or NotSupported."""
        with torch.inference_mode():
            adapter = place(read_adapter(path, self._max_rank), self._model, self._names)
        self._adapters[number] = adapter
        return Facts(adapter.digest, adapter.rank, adapter.num_bytes)

    def drop(self, number: int) -> None:
        del self._adapters[number]

    def step(self, rows: Numbers, drawn: Numbers) -> StepAdapters:
        """The adapter of each row of a step, and of each that a token is drawn from; 0: none."""
        return StepAdapters(self._adapters, rows, drawn)

"""StepAdapters: the adapters of one step's rows, as layers see them.

Rows of one adapter are multiplied together, however they lie in the step. A row without an adapter
is left alone, and so is every product that its adapter does not touch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.dist.homes import Homes
from quire.lora.placed import Adapter
from quire.nn.linear import Linear

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class StepAdapters:
    """`nn.linear.Adapted`."""

    def __init__(
        self, adapters: Mapping[int, Adapter], rows: Numbers, drawn: Numbers | None = None
    ) -> None:
        """Each row's adapter, 0 for none; `drawn`: of those that the tail keeps."""
        self._adapters, self._rows, self._drawn = adapters, rows, drawn

    @cached_property
    def _runs(self) -> list[tuple[Adapter, Tensor | None]]:
        found: list[tuple[Adapter, Tensor | None]] = []
        for number in np.unique(self._rows[self._rows > 0]).tolist():
            own = np.flatnonzero(self._rows == number)
            index = None if len(own) == len(self._rows) else torch.from_numpy(own)
            found.append((self._adapters[number], index))
        return found

    def multiply(self, linear: Linear, x: Tensor) -> Tensor:
        return linear.changed(x, lambda y: self._add(linear, x, y))

    def _add(self, linear: Linear, x: Tensor, y: Tensor) -> Tensor:
        for adapter, rows in self._runs:
            delta = adapter.deltas.get(linear)
            if delta is not None:
                delta.add(x, y, rows)
        return y

    def slots(self) -> tuple[Tensor, Tensor]:
        """For a recorded step: the slot of each row's adapter, and of each that is drawn from."""
        assert self._drawn is not None
        return self._slots_of(self._rows), self._slots_of(self._drawn)

    def _slots_of(self, rows: Numbers) -> Tensor:
        slots = np.zeros(len(rows), dtype=np.int32)
        for number in np.unique(rows[rows > 0]).tolist():
            slots[rows == number] = self._adapters[number].slot
        return torch.from_numpy(slots)

    def of_tail(self) -> StepAdapters:
        assert self._drawn is not None, "a tail of a tail"
        return StepAdapters(self._adapters, self._drawn)

    def of_own(self, homes: Homes) -> StepAdapters:
        return StepAdapters(self._adapters, homes.take(torch.from_numpy(self._rows)).numpy())

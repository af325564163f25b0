"""StepAdapters: the adapters of one step's rows, as layers see them.

Rows of one adapter are multiplied together, however they lie in the step. A row without an adapter
is left alone, and so is every product that its adapter does not touch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.lora.placed import Adapter
from quire.nn.linear import Linear

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class StepAdapters:
    """`nn.linear.Adapted`."""

    def __init__(
        self, adapters: Mapping[int, Adapter], rows: Numbers, drawn: Numbers | None = None
    ) -> None:
        """Each row's adapter, 0 for none; `drawn`: of those that the tail keeps."""
        self._adapters, self._drawn = adapters, drawn
        self._runs: list[tuple[Adapter, Tensor | None]] = []
        for number in np.unique(rows[rows > 0]).tolist():
            own = np.flatnonzero(rows == number)
            index = None if len(own) == len(rows) else torch.from_numpy(own)
            self._runs.append((adapters[number], index))

    def add(self, linear: Linear, x: Tensor, y: Tensor) -> Tensor:
        for adapter, rows in self._runs:
            delta = adapter.deltas.get(linear)
            if delta is not None:
                delta.add(x, y, rows)
        return y

    def of_tail(self) -> StepAdapters:
        assert self._drawn is not None, "a tail of a tail"
        return StepAdapters(self._adapters, self._drawn)

"""KeptStates: hidden states of positions that a head has not read yet, by row.

A step with drafts gives states of positions that may turn out wrong. The next step of the row
begins where they do, so whatever is put at a position replaces all that was kept from there on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Run:
    """States of neighbouring positions."""

    start: int
    stop: int
    pieces: list[Tensor]  # [positions, width] each, one behind the other


class KeptStates:
    """
    >>> kept = KeptStates()
    >>> kept.put(0, 5, torch.arange(3.0)[:, None])
    >>> kept.put(0, 7, torch.tensor([[9.0]]))  # position 7 was a wrong guess
    >>> kept.take(0, 8)
    (5, tensor([[0.], [1.], [9.]]))
    """

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}

    def forget(self, row: int) -> None:
        self._runs.pop(row, None)

    def put(self, row: int, start: int, states: Tensor) -> None:
        """States [positions, width] from `start` on, which must stay as they are."""
        run = self._runs.get(row)
        if run is None or not run.start <= start <= run.stop:
            self._runs[row] = _Run(start, start + len(states), [states])
            return
        while run.stop > start:
            last = run.pieces.pop()
            run.stop -= len(last)
            if run.stop < start:
                run.pieces.append(last[: start - run.stop])
                run.stop = start
        run.pieces.append(states)
        run.stop += len(states)

    def num_before(self, row: int, stop: int) -> int:
        """Positions kept before `stop`; 0 unless the one right before it is among them."""
        run = self._runs.get(row)
        return stop - run.start if run is not None and run.start < stop <= run.stop else 0

    def take(self, row: int, stop: int) -> tuple[int, Tensor]:
        """(first position, states) of all that `num_before` counts; they are kept no longer."""
        run = self._runs[row]
        whole = run.pieces[0] if len(run.pieces) == 1 else torch.cat(run.pieces)
        start, num = run.start, stop - run.start
        if stop == run.stop:
            del self._runs[row]
        else:
            # A copy: the few that are left must not keep all others in memory.
            self._runs[row] = _Run(stop, run.stop, [whole[num:].clone()])
        return start, whole[:num]

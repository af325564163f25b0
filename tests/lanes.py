"""LateLane: a lane that works as late as it may, or at a random moment; the twin of a CUDA stream.

Work is kept until somebody waits for a mark behind it. So a copy for which nobody waits finds what
was written since, and a forgotten `after` shows as wrong bytes.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

from quire.kv.tier_index import Landing
from quire.memory.lanes import Lanes


class LateMark:
    def __init__(self, lane: LateLane, end: int) -> None:
        self.lane, self.end = lane, end

    def is_over(self) -> bool:
        return self.lane.num_done >= self.end

    def wait(self) -> None:
        self.lane.run(self.end)


class LateLane:
    """`eagerness`: how likely it is that something already kept is done when more comes. `turn` is
    what all lanes of an engine have in common: one thread works at a time."""

    def __init__(self, turn: threading.RLock, eagerness: float = 0.0, seed: int = 0) -> None:
        self.eagerness, self._rng, self._turn = eagerness, random.Random(seed), turn
        self._kept: deque[Callable[[], None]] = deque()
        self.num_done = 0

    def do(self, work: Callable[[], None]) -> None:
        with self._turn:
            self._kept.append(work)
            while self._kept and self._rng.random() < self.eagerness:
                self.run(self.num_done + 1)

    def after(self, mark: Landing) -> None:
        assert isinstance(mark, LateMark)
        self.do(mark.wait)

    def mark(self) -> LateMark:
        with self._turn:
            return LateMark(self, self.num_done + len(self._kept))

    def run(self, end: int) -> None:
        with self._turn:
            while self.num_done < end:
                work = self._kept.popleft()
                work()
                self.num_done += 1


def late_lanes(eagerness: float = 0.0, seed: int = 0) -> Lanes:
    """An engine on a CPU computes at once: in its lane nothing is kept."""
    turn = threading.RLock()
    others = (LateLane(turn, eagerness, seed), LateLane(turn, eagerness, seed + 1))
    return Lanes(LateLane(turn, eagerness=1.0), *others)

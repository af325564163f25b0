"""Homes: which rows of a step are whose, where each rank attends those of its own requests.

Everybody has the rows of all in between: embedding, feed-forward, experts and head are shared out
by outputs as ever. Rows of a rank lie side by side, in the order of ranks, so nothing is sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quire.dist.comm import Comm


class Homes(Protocol):
    @property
    def has_own(self) -> bool:
        """Whether any row is this rank's. Nothing is computed of no rows; all are gathered still."""
        ...

    def take(self, x: Tensor) -> Tensor:
        """[rows, ...] -> [own rows, ...]."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """[own rows, width] -> [rows, width]."""
        ...


@dataclass(frozen=True, slots=True)
class StepHomes:
    counts: tuple[int, ...]  # rows of each rank
    rank: int
    comm: Comm

    @property
    def own(self) -> slice:
        begin = sum(self.counts[: self.rank])
        return slice(begin, begin + self.counts[self.rank])

    @property
    def has_own(self) -> bool:
        return self.counts[self.rank] > 0

    def take(self, x: Tensor) -> Tensor:
        return x[self.own]

    def gather(self, own: Tensor) -> Tensor:
        return self.comm.gather_rows(own, self.counts)

"""Ranks: this rank among those that hold a model together. What a layer needs to know of them.

A layer asks for a `Spread` of each width that is shared out: the outputs that this rank computes,
and the way to bring everybody's together. With one rank a spread is all of it, and `gather` gives
back what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from torch import Tensor

from quire.dist.comm import Comm, Graphed, SoloComm
from quire.dist.cuts import Cut, HeadCut, coarse_cuts, head_cuts, row_cuts, shares, width_cuts
from quire.dist.hush import Hush
from quire.dist.stages import Stage


class Recorded(Protocol):
    """What stands in for rows while a model is recorded (`native/tape.py`)."""

    def between(self, make: Callable[..., Tensor], width: int, *others: object) -> Tensor:
        """Stands in for [rows, width] that `make` gives for these rows, in every step."""
        ...


def between(x: object, make: Callable[..., Tensor], width: int, *others: Tensor) -> Tensor:
    """make(x, *others), now or, of what is recorded, in every step."""
    if isinstance(x, Tensor):
        return make(x, *others)
    return cast("Recorded", x).between(make, width, *others)


@dataclass(frozen=True, slots=True)
class Spread:
    """Columns that are shared out."""

    cuts: tuple[Cut, ...]  # of each rank
    rank: int
    comm: Comm

    @property
    def own(self) -> Cut:
        return self.cuts[self.rank]

    def gather(self, x: Tensor) -> Tensor:
        """[rows, own] -> [rows, all]."""
        if self.own.is_whole:
            return x
        widths = [cut.size for cut in self.cuts]
        return between(x, lambda rows: self.comm.gather(rows, widths), self.own.total)


@dataclass(frozen=True, slots=True)
class Passage:
    """From columns that are shared out, through a product, to rows that everybody has whole.

    Without splitting sums: everybody gathers all inputs, computes some outputs, and gathers those.
    Or, faster, each rank computes all outputs of its own inputs, and what the ranks have is added,
    in their order: the same bits for any batch, others for another number of ranks."""

    inputs: Spread
    outputs: Spread
    splits_sums: bool

    @property
    def taken(self) -> int | Cut:
        """Inputs of the product here."""
        return self.inputs.own if self.splits_sums else self.inputs.own.total

    @property
    def made(self) -> int | Cut:
        """Outputs of the product here."""
        return self.outputs.own.total if self.splits_sums else self.outputs.own

    @property
    def has_bias(self) -> bool:
        """Where sums are split, one rank adds it."""
        return not self.splits_sums or self.inputs.rank == 0

    @property
    def is_entered(self) -> bool:
        """Whether inputs are what the product here takes: nobody else is asked for some."""
        return self.splits_sums or self.inputs.own.is_whole

    def enter(self, x: Tensor) -> Tensor:
        return x if self.splits_sums else self.inputs.gather(x)

    def leave(self, y: Tensor) -> Tensor:
        """-> [rows, all]."""
        if not self.splits_sums:
            return self.outputs.gather(y)
        comm, size = self.inputs.comm, len(self.inputs.cuts)
        return between(y, lambda rows: sum_of_all(rows, comm, size), self.outputs.own.total)


def sum_of_all(rows: Tensor, comm: Comm, size: int) -> Tensor:
    """What everybody has, added rank by rank."""
    every = comm.gather_rows(rows, [len(rows)] * size).view(size, *rows.shape)
    total = every[0]
    for rank in range(1, size):
        total += every[rank]
    return total


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that share each layer of a stage among them."""

    rank: int = 0
    size: int = 1
    comm: Comm = field(default_factory=SoloComm)
    stage: Stage = field(default_factory=Stage)
    splits_sums: bool = False  # faster, and not to the bits of one rank
    has_homes: bool = False  # each has requests of its own, whose rows it alone attends
    hush: Hush = field(default_factory=Hush)  # while it is on, nobody else is asked
    sharers: int = 1  # ranks on the same GPU as this one, itself included
    graphed: Graphed | None = None  # `comm` without its hush, where CUDA graphs can capture it

    @property
    def attention(self) -> Ranks:
        """Who shares the heads."""
        return ALONE if self.has_homes else self

    @property
    def num_homes(self) -> int:
        """Ranks that keep pages of other requests than the first one does."""
        return self.size if self.has_homes else 1

    @property
    def is_alone(self) -> bool:
        """Nobody else has a part of our layers; there may be other stages."""
        return self.size == 1

    @property
    def num_processes(self) -> int:
        return self.size * self.stage.count

    @property
    def process(self) -> int:
        """Which of all processes this is; 0 schedules."""
        return self.stage.index * self.size + self.rank

    def spread(self, width: int) -> Spread:
        """Outputs of a product."""
        return self._spread(width_cuts(width, self.size))

    def spread_within(self, width: int) -> Spread:
        """Outputs of a product that another one takes."""
        cuts = coarse_cuts if self.splits_sums else width_cuts
        return self._spread(cuts(width, self.size))

    def passage(self, inputs: Spread, width: int, whole: bool = False) -> Passage:
        """From these inputs to `width` outputs. `whole`: something happens to all inputs at once
        on the way."""
        splits = self.splits_sums and not inputs.own.is_whole and not whole
        return Passage(inputs, self.spread(width), splits)

    def spread_rows(self, num_rows: int) -> Spread:
        """Rows of an embedding, and the outputs of a head."""
        return self._spread(row_cuts(num_rows, self.size))

    def spread_heads(self, num_heads: int, num_kv_heads: int, dim: int) -> Spread:
        """What attention gives for the queries of each rank, `dim` columns a head."""
        cuts = head_cuts(num_heads, num_kv_heads, self.size)
        return self._spread(tuple(cut.q.times(dim) for cut in cuts))

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadCut:
        return head_cuts(num_heads, num_kv_heads, self.size)[self.rank]

    def experts(self, num_experts: int) -> Sequence[Cut]:
        """Which experts each rank has."""
        return shares(num_experts, self.size)

    def _spread(self, cuts: tuple[Cut, ...]) -> Spread:
        return Spread(cuts, self.rank, self.comm)


ALONE = Ranks()

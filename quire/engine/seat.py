"""Seat: the place of a process among those that hold a model, as the composition root sees it.

Alone, first of several, or one of the others. The seat says which share of the model is ours, how
many pages the cache has, and which runner executes plans; everything else is built alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from quire.config import Decision, EngineArgs
from quire.dist.ranks import ALONE, Ranks
from quire.engine.tier_identity import PageMakers
from quire.engine.tier_parts import TierParts, open_tiers
from quire.runner.rank_runner import FirstRunner, OtherRunner, Others
from quire.runner.runner import ModelRunner
from quire.runner.stage_runner import BesideFirstRunner, FirstStageRunner, LaterStageRunner

if TYPE_CHECKING:
    from quire.engine.rank_group import RankGroup
    from quire.engine.rank_tiers import OtherTiers


class Seat(Protocol):
    args: EngineArgs
    ranks: Ranks
    group: RankGroup | None  # of the first seat alone

    def num_pages(self, sized: Callable[[], int]) -> int:
        """Of everybody's cache; `sized` measures how many fit here."""
        ...

    def runner(self, *parts: Any) -> ModelRunner:
        """Made of what a `ModelRunner` is made of."""
        ...

    def open_tiers(
        self, made: PageMakers, runner: ModelRunner, decisions: list[Decision]
    ) -> TierParts:
        """What keeps pages outside the pool."""
        ...


class LoneSeat:
    ranks = ALONE
    group: RankGroup | None = None

    def __init__(self, args: EngineArgs) -> None:
        self.args = args

    def num_pages(self, sized: Callable[[], int]) -> int:
        return sized()

    def runner(self, *parts: Any) -> ModelRunner:
        return ModelRunner(*parts)

    def open_tiers(
        self, made: PageMakers, runner: ModelRunner, decisions: list[Decision]
    ) -> TierParts:
        return open_tiers(self.args, made, runner, decisions)


class FirstSeat:
    def __init__(self, args: EngineArgs, group: RankGroup) -> None:
        self.group: RankGroup | None = group
        self._group = group
        self.args, self.ranks = group.begin(args)

    def num_pages(self, sized: Callable[[], int]) -> int:
        """The first rank's share of the heads is the largest; `sized` looks at all stages."""
        return self._group.set_pages(sized())

    def runner(self, *parts: Any) -> ModelRunner:
        group = self._group
        heard = (group.give_prompts, group.hand_over)
        others = Others(group.announce, group.rebalance, *heard, group.settle, group.lost)
        kind = FirstRunner if self.ranks.stage.is_only else FirstStageRunner
        return kind(others, self.ranks.comm, *parts)

    def open_tiers(
        self, made: PageMakers, runner: ModelRunner, decisions: list[Decision]
    ) -> TierParts:
        from quire.engine.rank_tiers import open_first

        return open_first(self.args, made, runner, decisions, self._group)


class OtherSeat:
    group: RankGroup | None = None

    def __init__(
        self,
        args: EngineArgs,
        ranks: Ranks,
        await_pages: Callable[[], int],
        agree: Callable[[int], int] | None = None,
    ) -> None:
        """`agree`: says how many pages fit here, and returns how many there will be; None: the
        first rank knows."""
        self.args, self.ranks, self._await_pages, self._agree = args, ranks, await_pages, agree
        self.tiers: OtherTiers | None = None  # that the first rank has not opened so far

    def num_pages(self, sized: Callable[[], int]) -> int:
        return self._await_pages() if self._agree is None else self._agree(sized())

    def runner(self, *parts: Any) -> ModelRunner:
        stage = self.ranks.stage
        if not stage.is_first:
            return LaterStageRunner(*parts)
        return (OtherRunner if stage.is_only else BesideFirstRunner)(self.ranks.comm, *parts)

    def open_tiers(
        self, made: PageMakers, runner: ModelRunner, decisions: list[Decision]
    ) -> TierParts:
        from quire.engine.rank_tiers import OtherTiers

        self.tiers = OtherTiers(self.args, made, runner)
        return TierParts()


def seat_of(args: EngineArgs, group: RankGroup | None = None) -> Seat:
    """`group`: one that was started before; it is the caller's to close."""
    if args.parallel.num_ranks == 1:
        return LoneSeat(args)
    from quire.engine.rank_group import RankGroup  # and msgspec, which one rank does without
    from quire.engine.rank_places import rank_places

    rank_places(args)  # what is wrong with devices is said before a process is started

    return FirstSeat(args, group or RankGroup(args.parallel.num_ranks, nodes=args.parallel))

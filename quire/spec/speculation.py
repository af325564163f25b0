"""Speculation: before each step, who gets how many drafts; after it, what that was worth.

The proposer guesses, `survival.py` knows what its guesses are worth, `depth.py` weighs that against
the costs of a step. The scheduler then feeds the drafts and `verify.py` judges them. Nothing here
can change what is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire.request import Request, RequestId
from quire.sched.scheduler import Scheduler
from quire.spec.depth import Candidate, Costs, best_depths
from quire.spec.proposer import Guess, Proposer
from quire.spec.survival import UNJUDGED, Survival
from quire.spec.tree import chosen, is_chain, paths_of, survivals, trunk_of
from quire.step import Draft, StepPlan, TokenEvent

# Steps without drafts, after which results in flight are awaited in one step of so many only.
PATIENCE, LOOK_EVERY = 8, 8


class Drafts(Protocol):
    """Who guesses, and how far: asked before every step, told of every step's outcome."""

    def awaits_results(self, scheduler: Scheduler) -> bool:
        """Whether steps in flight are to be settled before drafts are made: where the host lags
        behind, the newest token of every request is unknown, and nothing can follow it."""
        ...

    def make(self, scheduler: Scheduler) -> Mapping[RequestId, Draft]:
        """Drafts for requests that decode next; the scheduler may use fewer of them."""
        ...

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent]) -> None:
        """What became of a step, with drafts or without."""
        ...


@dataclass(slots=True)
class SpecCounts:
    """Totals since start, for stats."""

    drafted_at: list[int] = field(default_factory=list)  # by place among a request's drafts
    accepted_at: list[int] = field(default_factory=list)
    num_runs: int = 0  # works that carried drafts
    seconds: float = 0.0  # spent on making them

    def as_dict(self) -> dict[str, float]:
        by_place = {f"accepted_at_{i}": float(n) for i, n in enumerate(self.accepted_at)}
        return {"num_draft_runs": self.num_runs, "draft_seconds": self.seconds, **by_place}

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.num_runs += 1
        while len(self.drafted_at) < num_drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for place in range(num_drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < num_accepted


class Taken(NamedTuple):
    """What is fed of a guess, and the chances that its proposer gave that."""

    draft: Draft
    chances: tuple[float, ...]

    @staticmethod
    def all_of(guess: Guess) -> Taken:
        num = len(guess.chances)
        return Taken.of(guess, range(1, 1 + num) if guess.parents else (), num)

    @staticmethod
    def of(guess: Guess, nodes: Sequence[int], num: int) -> Taken:
        """The first `num` guesses, or these nodes of a tree."""
        if not nodes:
            return Taken(Draft(num, guess.tokens[:num]), guess.chances[:num])
        # What follows the first guesses lies where a chain would have it: if it is right, as it
        # mostly is, nothing moves.
        trunk = trunk_of(guess.parents)
        nodes = sorted(nodes, key=lambda node: node not in trunk)
        tokens = tuple(guess.tokens[node - 1] for node in nodes) if guess.tokens else ()
        parents = chosen(nodes, guess.parents)
        draft = Draft(num, tokens, () if is_chain(parents) else parents)
        return Taken(draft, tuple(guess.chances[node - 1] for node in nodes))


class Limits(NamedTuple):
    """How far to go at most, and whether always so far."""

    depth: int
    is_fixed: bool = False
    name: str = ""  # of the method, for those who watch


class Speculation:
    def __init__(
        self,
        proposer: Proposer,
        limits: Limits,
        costs: Costs | None,
        counts: SpecCounts | None = None,
    ) -> None:
        """Without costs the depth is always the most. A drafter may add to the counts too."""
        self.proposer, self.limits, self.costs = proposer, limits, costs
        self.counts = counts or SpecCounts()
        self.survival = Survival()
        self._known: dict[RequestId, Request] = {}
        self._fed: dict[RequestId, tuple[float, ...]] = {}  # own chances of drafts in flight
        self._num_without = 0  # steps in a row that nobody drafted for

    @property
    def name(self) -> str:
        return self.limits.name

    def awaits_results(self, scheduler: Scheduler) -> bool:
        if scheduler.config.waits_for_draws:
            return False  # requests wait one by one, for steps on other stages
        has_paid = self.limits.is_fixed or self._num_without < PATIENCE
        if not has_paid and self._num_without % LOOK_EVERY:
            return False
        return any(self._allowed(request) for request in scheduler.running.values())

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        begun = time.perf_counter()
        self._forget_ended(scheduler)
        guesses: dict[RequestId, Guess] = {}
        num_decodes = 0
        for request in scheduler.running.values():
            if request.num_to_feed != 1:
                continue
            num_decodes += 1
            most = min(self._most(request), scheduler.max_drafts(request))
            if most > 0 and not request.num_pending:
                guess = self.proposer.propose(request, most)
                if guess.chances:
                    guesses[request.id] = guess
        taken = self._cut(guesses, num_decodes - len(guesses)) if guesses else {}
        self._fed = {id: made.chances for id, made in taken.items()}
        self._num_without = 0 if taken else self._num_without + 1
        self.survival.fade(list(scheduler.running))
        self.counts.seconds += time.perf_counter() - begun
        return {id: made.draft for id, made in taken.items()}

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent]) -> None:
        trees = {work.request_id: work.parents for work in plan.works if work.parents}
        for event in events:
            if not event.num_drafted:
                continue
            id, num_levels = event.request_id, event.num_drafted
            chances = self._fed.get(id, ())[: event.num_drafted]
            if parents := trees.get(id):
                num_levels = max(map(len, paths_of(parents)))
                right = (*event.branch, *([UNJUDGED] if event.finish is not None else ()))
                if len(chances) == len(parents):
                    self.survival.learn_tree(id, chances, parents, right)
            else:
                if event.finish is not None:  # what stood behind the end was not judged
                    chances = chances[: event.num_accepted]
                self.survival.learn(id, chances, event.num_accepted)
            self.counts.add(num_levels, event.num_accepted)

    def _most(self, request: Request) -> int:
        """What the request allows; also notes that it runs."""
        self._known[request.id] = request
        return self._allowed(request)

    def _allowed(self, request: Request) -> int:
        if request.params.pooling is not None:
            return 0
        asked = request.params.num_speculative_tokens
        return self.limits.depth if asked is None else min(asked, self.limits.depth)

    def _cut(self, guesses: dict[RequestId, Guess], num_others: int) -> dict[RequestId, Taken]:
        if self.limits.is_fixed or self.costs is None:
            return {id: Taken.all_of(guess) for id, guess in guesses.items()}
        promising = {id: self._promising(id, guess) for id, guess in guesses.items()}
        candidates = [
            Candidate(
                chances,
                bool(guesses[id].tokens),
                not self._known[id].params.is_greedy,
                chosen(nodes, guesses[id].parents) if nodes else (),
            )
            for id, (nodes, chances) in promising.items()
        ]
        depths = best_depths(candidates, num_others, self.costs)
        return {
            id: Taken.of(guesses[id], nodes[:depth], depth)
            for (id, (nodes, _)), depth in zip(promising.items(), depths, strict=True)
            if depth
        }

    def _promising(self, id: RequestId, guess: Guess) -> tuple[Sequence[int], Sequence[float]]:
        """A tree's drafts, those that survive most first, and chances in that order."""
        if not guess.parents:
            return (), self.survival.chances(id, guess.chances)
        chances = self.survival.tree_chances(id, guess.chances, guess.parents)
        found = survivals(chances, guess.parents)
        nodes = sorted(range(1, 1 + len(found)), key=lambda node: (-found[node - 1], node))
        return nodes, [chances[node - 1] for node in nodes]

    def _forget_ended(self, scheduler: Scheduler) -> None:
        """Requests that left without a word to us: finished, aborted, failed."""
        if self._known.keys() <= scheduler.running.keys():
            return
        for id in [id for id in self._known if id not in scheduler.running]:
            if scheduler.waiting.get(id) is None:
                self.survival.forget(id)
                self.proposer.forget(self._known.pop(id))

"""Speculation: before each step, who gets how many drafts; after it, what that was worth.

The proposer guesses, `survival.py` knows what its guesses are worth, `depth.py` weighs that against
the costs of a step, and `looks.py` says who need not be asked for a while. The scheduler then feeds
the drafts and `verify.py` judges them. Nothing here can change what is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from quire.request import Request, RequestId
from quire.sched.scheduler import Scheduler
from quire.spec.depth import Candidate, Costs, best_depths
from quire.spec.learned_costs import Extra, LearnedCosts
from quire.spec.looks import PATIENCE, Looks
from quire.spec.proposer import Guess, Proposer
from quire.spec.survival import UNJUDGED, Survival
from quire.spec.tree import Parents, chosen, is_chain, paths_of, survivals, trunk_of
from quire.step import Draft, StepPlan, TokenEvent, Took, Work

# Steps between two that wait for results in flight, at most: for the requests there are, and when
# one comes that was not there before.
MOST_AHEAD, NEWCOMER = 256, 32


class Drafts(Protocol):
    """Who guesses, and how far: asked before every step, told of every step's outcome."""

    def awaits_results(self, scheduler: Scheduler) -> bool:
        """Whether steps in flight are to be settled before drafts are made: where the host lags
        behind, the newest token of every request is unknown, and nothing can follow it."""
        ...

    def make(self, scheduler: Scheduler) -> Mapping[RequestId, Draft]:
        """Drafts for requests that decode next; the scheduler may use fewer of them."""
        ...

    def marked(self, plan: StepPlan) -> StepPlan:
        """The plan that came of them, in which works say whether drafts may follow from them."""
        ...

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent], took: Took) -> None:
        """What became of a step, with drafts or without, and how long it took."""
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
    head: float = 0.0  # chance that counting begins with, of a head that reads states; 0: none


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
        self.learned = None if costs is None else LearnedCosts(costs)
        self._spent = 0.0  # on making drafts, when the newest step was about to begin
        self.counts = counts or SpecCounts()
        self._known: dict[RequestId, Request] = {}
        self._fed: dict[RequestId, tuple[float, ...]] = {}  # own chances of drafts in flight
        self._promising: set[RequestId] = set()  # drafts of these would pay in this step
        self._read: set[RequestId] = set()  # the head reads what their newest step left
        self._step = 0
        self.restart()

    def restart(self) -> None:
        """Forget what drafts were worth so far."""
        self.survival = Survival()
        self._looks: dict[RequestId, Looks] = {}
        # In which steps results in flight are awaited; nothing speaks for it so far.
        self._waits = Looks(left=PATIENCE / 2, most=MOST_AHEAD)
        self._is_awaited = False
        self._load = 0  # most requests that ran since their number halved
        self._worth: dict[tuple[float, int, int], bool] = {}

    @property
    def name(self) -> str:
        return self.limits.name

    # ------------------------------------------------------------ before a step

    def awaits_results(self, scheduler: Scheduler) -> bool:
        if scheduler.config.waits_for_draws:
            return False  # requests wait one by one, for steps on other stages
        self._notice(scheduler)
        due, step = self._waits.is_due, self._step + 1
        is_trial = self.learned is not None and self.learned.is_trial(step)
        self._is_awaited = (self.limits.is_fixed or is_trial or due(step)) and any(
            self._allowed(request) and (self.limits.is_fixed or self._looks[id].is_due(step))
            for id, request in scheduler.running.items()
        )
        return self._is_awaited

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        begun = time.perf_counter()
        self._step += 1
        self._notice(scheduler)
        decodes = [request for request in scheduler.running.values() if request.num_to_feed == 1]
        wants_plain = self._take_costs(len(decodes))
        guesses = self._guesses(decodes, scheduler)
        taken = self._cut(guesses, len(decodes) - len(guesses)) if guesses else {}
        self._promising = set(taken)
        for id in guesses:
            (self._looks[id].promise if id in taken else self._looks[id].miss)()
        if self._is_awaited:
            (self._waits.promise if taken else self._waits.miss)()
            self._is_awaited = False
        if self.limits.head:  # it begins to read where it has not, and guesses in the next step
            for id in [id for id in taken if not guesses[id].tokens and id not in self._read]:
                del taken[id]
        taken = {} if wants_plain else taken
        self._fed = {id: made.chances for id, made in taken.items()}
        self.survival.fade(list(scheduler.running))
        self.counts.seconds += time.perf_counter() - begun
        self._spent = self.counts.seconds
        return {id: made.draft for id, made in taken.items()}

    def _guesses(self, decodes: Sequence[Request], scheduler: Scheduler) -> dict[RequestId, Guess]:
        """For those who are to be looked at."""
        guesses: dict[RequestId, Guess] = {}
        is_fixed, is_worth = self.limits.is_fixed, self._is_worth(1.0, len(decodes), 0)
        for request in decodes:
            looks = self._looks[request.id]
            if request.num_pending or not (is_fixed or looks.is_due(self._step)):
                continue
            most = min(self._allowed(request), scheduler.max_drafts(request))
            if most <= 0:
                continue
            guess = self.proposer.propose(request, most) if is_worth else None
            if guess is None:
                looks.miss()
            elif guess.chances:
                guesses[request.id] = guess
            else:
                looks.nothing()
        return guesses

    def _take_costs(self, num_decodes: int) -> bool:
        """What this step's drafts are weighed with; whether it is to have none."""
        if self.learned is None or self.limits.is_fixed:
            return False
        costs = self.learned.for_step(self._step, num_decodes, self.limits.depth)
        if costs != self.costs:
            self.costs = costs
            self._worth.clear()
        if costs is not self.learned.now:  # a trial, for which it is worth while to look
            for looks in self._looks.values():
                looks.soon(1)
        return self.learned.wants_plain(self._step, num_decodes)

    def _notice(self, scheduler: Scheduler) -> None:
        """Who came and who left, and whether there is more room for drafts than there was."""
        running = scheduler.running
        self._forget_ended(scheduler)
        for id, request in running.items():
            if id not in self._looks:
                self._known[id], self._looks[id] = request, Looks()
                if self._allowed(request):
                    self._waits.soon(NEWCOMER)
        self._load = max(self._load, len(running))
        if 2 * len(running) <= self._load:
            self._load = len(running)
            for looks in (self._waits, *self._looks.values()):
                looks.soon(1)

    def _is_worth(self, chance: float, num_drafting: int, num_others: int) -> bool:
        """Whether drafts that are right so often pay in a step of so many requests."""
        if self.limits.is_fixed or self.costs is None:
            return True
        key = chance, num_drafting, num_others
        if key not in self._worth:
            each = Candidate((chance,) * self.limits.depth)
            self._worth[key] = any(best_depths([each] * num_drafting, num_others, self.costs))
        return self._worth[key]

    # ------------------------------------------------------------ the step

    def marked(self, plan: StepPlan) -> StepPlan:
        if not self.limits.head:
            return plan
        new = {a.request_id for a in plan.admissions if a.params.num_speculative_tokens == 0}
        allowed = [work.request_id for work in plan.works if self._may_draft(work, new)]
        is_worth = self._is_worth(self.limits.head, len(allowed), len(plan.works) - len(allowed))
        read = {id for id in allowed if self._is_followed(id, is_worth)}
        self._read.difference_update(work.request_id for work in plan.works)
        self._read |= read
        if len(read) == len(plan.works):
            return plan
        works = [work._replace(is_read=work.request_id in read) for work in plan.works]
        return replace(plan, works=tuple(works))

    def _may_draft(self, work: Work, refusing: set[RequestId]) -> bool:
        request = self._known.get(work.request_id)
        return self._allowed(request) > 0 if request else work.request_id not in refusing

    def _is_followed(self, id: RequestId, is_worth: bool) -> bool:
        """Whether a draft may follow soon from what the step leaves of this request."""
        if self.limits.is_fixed or id in self._promising:
            return True
        looks = self._looks.get(id)
        return is_worth and self._waits.is_eager and (looks is None or looks.is_eager)

    # ------------------------------------------------------------ after it

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent], took: Took) -> None:
        if self.learned is not None and not self.limits.is_fixed:
            accepted = sum(event.num_accepted for event in events)
            extra = Extra(self._num_drawn(plan), accepted, self.counts.seconds - self._spent)
            self.learned.learn(self._step, plan, took, extra)
        trees = {work.request_id: work.parents for work in plan.works if work.parents}
        num_drafted = num_accepted = 0
        for event in events:
            if not event.num_drafted:
                continue
            num_drafted += event.num_drafted
            num_accepted += event.num_accepted
            self._learn_of(event, trees.get(event.request_id))
        if num_drafted:
            (self._waits.hit if self._paid(num_accepted, len(plan.works)) else self._waits.wrong)()

    def _num_drawn(self, plan: StepPlan) -> int:
        """Tokens that were drawn, and not the likeliest taken."""
        owners = ((work, self._known.get(work.request_id)) for work in plan.works)
        return sum(
            work.num_tokens for work, owner in owners if owner and not owner.params.is_greedy
        )

    def _learn_of(self, event: TokenEvent, parents: Parents | None) -> None:
        id, num_levels = event.request_id, event.num_drafted
        chances = self._fed.get(id, ())[: event.num_drafted]
        if parents:
            num_levels = max(map(len, paths_of(parents)))
            right = (*event.branch, *([UNJUDGED] if event.finish is not None else ()))
            if len(chances) == len(parents):
                self.survival.learn_tree(id, chances, parents, right)
        else:
            if event.finish is not None:  # what stood behind the end was not judged
                chances = chances[: event.num_accepted]
            self.survival.learn(id, chances, event.num_accepted)
        if (looks := self._looks.get(id)) is not None:
            (looks.hit if event.num_accepted else looks.wrong)()
        self.counts.add(num_levels, event.num_accepted)

    def _paid(self, num_accepted: int, num_requests: int) -> bool:
        """Whether a step's right drafts were worth waiting for results."""
        if self.costs is None:
            return num_accepted > 0
        saved = num_accepted * self.costs.plain(num_requests)
        return num_accepted > 0 and saved >= num_requests * self.costs.wait

    def _allowed(self, request: Request) -> int:
        if request.params.pooling is not None:
            return 0
        asked = request.params.num_speculative_tokens
        return self.limits.depth if asked is None else min(asked, self.limits.depth)

    def _cut(self, guesses: dict[RequestId, Guess], num_others: int) -> dict[RequestId, Taken]:
        if self.limits.is_fixed or self.costs is None:
            return {id: Taken.all_of(guess) for id, guess in guesses.items()}
        promising = {id: self._ranked(id, guess) for id, guess in guesses.items()}
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

    def _ranked(self, id: RequestId, guess: Guess) -> tuple[Sequence[int], Sequence[float]]:
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
                self._looks.pop(id, None)
                self._read.discard(id)
                self.proposer.forget(self._known.pop(id))

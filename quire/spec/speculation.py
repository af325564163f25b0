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

from quire.draft_tree import MAX_DRAFTS
from quire.request import Request, RequestId
from quire.sched.scheduler import Scheduler
from quire.spec.depth import Candidate, Costs, best_depths, weighed
from quire.spec.in_turn import first_enough
from quire.spec.learned_costs import Extra, LearnedCosts
from quire.spec.looks import PATIENCE, Looks
from quire.spec.proposer import Proposer
from quire.spec.source import Offer, Source
from quire.spec.survival import UNJUDGED
from quire.spec.taken import Taken
from quire.spec.tree import Parents, chosen, paths_of, survivals
from quire.spec.verify import num_right
from quire.step import Draft, StepPlan, TokenEvent, Took, Work

# Steps between two that wait for results in flight, at most: for the requests there are, and when
# one comes that was not there before.
MOST_AHEAD, NEWCOMER = 256, 32
FEW = 8  # requests whose texts are asked often, as that takes little beside a step
MOST_WEIGHED = 1024  # drafts in a step: rows beyond take as long as they are many on any machine


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
        model: Proposer | None = None,
    ) -> None:
        """Without costs the depth is always the most. A drafter may add to the counts too. With a
        model each request gets the drafts that promise more, the proposer's or the model's."""
        self._proposers = [proposer] if model is None else [proposer, model]
        self.limits, self.costs = limits, costs
        self.learned = None if costs is None else LearnedCosts(costs)
        self._spent = 0.0  # on making drafts, when the newest step was about to begin
        self._shared = 0.0  # of it, what is told or of no step with drafts
        self.counts = counts or SpecCounts()
        self._known: dict[RequestId, Request] = {}
        self._fed: dict[RequestId, tuple[Source, tuple[float, ...]]] = {}  # own chances of drafts
        self._told: dict[RequestId, tuple[int, Offer]] = {}  # before which token, fed or not
        self._promising: set[RequestId] = set()  # drafts of these would pay in this step
        self._read: set[RequestId] = set()  # the head reads what their newest step left
        self._step = 0
        self.restart()

    def restart(self) -> None:
        """Forget what drafts were worth so far."""
        self._sources = [
            Source(proposer, looks={id: Looks() for id in self._known})
            for proposer in self._proposers
        ]
        # In which steps results in flight are awaited; nothing speaks for it so far.
        self._waits = Looks(left=PATIENCE / 2, most=MOST_AHEAD)
        self._is_awaited = False
        self._load = 0  # most requests that ran since their number halved
        self._worth: dict[tuple[float, int, int], bool] = {}

    @property
    def name(self) -> str:
        return self.limits.name

    @property
    def proposer(self) -> Proposer:
        return self._proposers[0]

    @proposer.setter
    def proposer(self, proposer: Proposer) -> None:
        """Who guesses from now on, alone."""
        self._proposers, self._sources = [proposer], self._sources[:1]
        self._sources[0].proposer = proposer

    # ------------------------------------------------------------ before a step

    def awaits_results(self, scheduler: Scheduler) -> bool:
        if scheduler.config.waits_for_draws:
            return False  # requests wait one by one, for steps on other stages
        self._notice(scheduler)
        is_fixed, step = self.limits.is_fixed, self._step + 1
        is_trial = self.learned is not None and self.learned.is_trial(step)
        self._is_awaited = (is_fixed or is_trial or self._waits.is_due(step)) and any(
            self._allowed(request)
            and (is_fixed or any(source.looks[id].is_due(step) for source in self._sources))
            for id, request in scheduler.running.items()
        )
        return self._is_awaited

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        begun = time.perf_counter()
        self._step += 1
        self._notice(scheduler)
        decodes = [request for request in scheduler.running.values() if request.num_to_feed == 1]
        wants_plain = self._take_costs(len(decodes))
        offers = self._offers(decodes, scheduler)
        taken = self._cut(offers, len(decodes) - len(offers)) if offers else {}
        self._promising = {id for id in taken if not offers[id].guess.tokens}
        for id, offer in offers.items():
            offer.weighed(id, pays=id in taken, are_few=len(decodes) <= FEW)
        if self._is_awaited:
            (self._waits.promise if taken else self._waits.miss)()
            self._is_awaited = False
        if self.limits.head:  # it begins to read where it has not, and guesses in the next step
            for id in self._promising - self._read:
                del taken[id]
        taken = {} if wants_plain else taken
        self._fed = {id: (offers[id].source, made.chances) for id, made in taken.items()}
        for source in self._sources:
            source.survival.fade(list(scheduler.running))
        self.counts.seconds += time.perf_counter() - begun
        self._spent = self.counts.seconds
        return {id: made.draft for id, made in taken.items()}

    def _offers(self, decodes: Sequence[Request], scheduler: Scheduler) -> dict[RequestId, Offer]:
        """For those who are to be looked at."""
        chosen: dict[RequestId, Offer] = {}
        is_fixed, is_worth = self.limits.is_fixed, self._is_worth(1.0, len(decodes), 0)
        room = MAX_DRAFTS if is_fixed else max(1, MOST_WEIGHED // max(1, len(decodes)))
        for request in decodes:
            if not (is_fixed or any(s.looks[request.id].is_due(self._step) for s in self._sources)):
                continue
            most = min(self._allowed(request), scheduler.max_drafts(request), room)
            if request.num_pending or most <= 0:
                continue
            found = []
            for source in self._sources:
                looks = source.looks[request.id]
                if not (is_fixed or looks.is_due(self._step)):
                    continue
                if not is_worth:
                    looks.miss()
                elif (offer := source.offer(request, most)) is not None:
                    found.append(offer)
                    if offer.is_known:
                        self._told[request.id] = len(request.tokens), offer
            if found:
                chosen[request.id] = self._best(request, found, len(decodes) - 1)
        return chosen

    def _best(self, request: Request, offers: Sequence[Offer], num_others: int) -> Offer:
        if len(offers) == 1:
            return offers[0]
        if self.limits.is_fixed or self.costs is None:
            return first_enough(offers, lambda offer: offer.guess.expected())
        rates = [
            weighed([self._candidate(request.id, offer)[1]], num_others, self.costs)[0]
            for offer in offers
        ]
        return offers[rates.index(max(rates))]

    def _take_costs(self, num_decodes: int) -> bool:
        """What this step's drafts are weighed with; whether it is to have none."""
        if self.learned is None or self.limits.is_fixed:
            return False
        costs = self.learned.for_step(self._step, num_decodes, self.limits.depth)
        if costs != self.costs:
            self.costs = costs
            self._worth.clear()
        if costs is not self.learned.now:  # a trial, for which it is worth while to look
            for source in self._sources:
                source.soon()
        return self.learned.wants_plain(self._step, num_decodes)

    def _notice(self, scheduler: Scheduler) -> None:
        """Who came and who left, and whether there is more room for drafts than there was."""
        running = scheduler.running
        self._forget_ended(scheduler)
        for id, request in running.items():
            if id not in self._known:
                self._known[id] = request
                for source in self._sources:
                    source.looks[id] = Looks()
                if self._allowed(request):
                    self._waits.soon(NEWCOMER)
        self._load = max(self._load, len(running))
        if 2 * len(running) <= self._load:
            self._load = len(running)
            self._waits.soon(1)
            for source in self._sources:
                source.soon()

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
        looks = self._sources[-1].looks.get(id)  # of the head
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
            judged = self._judge(event)
            if not event.num_drafted:
                continue
            num_drafted += event.num_drafted
            num_accepted += event.num_accepted
            self._count(event, trees.get(event.request_id, ()), judged)
        self._share_seconds([event.request_id for event in events if event.num_drafted])
        if num_drafted:
            (self._waits.hit if self._paid(num_accepted, len(plan.works)) else self._waits.wrong)()

    def _share_seconds(self, ids: Sequence[RequestId]) -> None:
        """Tell requests whose drafts were judged what making drafts took since the last step."""
        for id in ids:
            if (request := self._known.get(id)) is not None:
                request.draft_seconds += (self.counts.seconds - self._shared) / len(ids)
        self._shared = self.counts.seconds

    def _num_drawn(self, plan: StepPlan) -> int:
        """Tokens that were drawn, and not the likeliest taken."""
        owners = ((work, self._known.get(work.request_id)) for work in plan.works)
        return sum(
            work.num_tokens for work, owner in owners if owner and not owner.params.is_greedy
        )

    def _judge(self, event: TokenEvent) -> Source | None:
        """Whose guess the host knew: of that what was not fed is judged as well."""
        if not event.tokens or (told := self._told.pop(event.request_id, None)) is None:
            return None
        id, (start, (source, guess)) = event.request_id, told
        drawn = self._known[id].tokens[start:]
        right = num_right(drawn, guess.tokens)
        source.survival.learn(id, guess.chances[: len(drawn)], right)
        if right and len(self._known) <= FEW and (looks := source.looks.get(id)) is not None:
            looks.hit()
        return source

    def _count(self, event: TokenEvent, parents: Parents, judged: Source | None) -> None:
        """What became of drafts that were fed."""
        id, num_levels = event.request_id, event.num_drafted
        source, chances = self._fed.get(id, (self._sources[-1], ()))
        chances = chances[: event.num_drafted]
        if parents:
            num_levels = max(map(len, paths_of(parents)))
            right = (*event.branch, *([UNJUDGED] if event.finish is not None else ()))
            if len(chances) == len(parents):
                source.survival.learn_tree(id, chances, parents, right)
        elif judged is not source:
            if event.finish is not None:  # what stood behind the end was not judged
                chances = chances[: event.num_accepted]
            source.survival.learn(id, chances, event.num_accepted)
        if (looks := source.looks.get(id)) is not None:
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

    def _cut(self, offers: dict[RequestId, Offer], num_others: int) -> dict[RequestId, Taken]:
        if self.limits.is_fixed or self.costs is None:
            return {id: Taken.all_of(offer.guess) for id, offer in offers.items()}
        made = {id: self._candidate(id, offer) for id, offer in offers.items()}
        depths = best_depths([candidate for _, candidate in made.values()], num_others, self.costs)
        return {
            id: Taken.of(offers[id].guess, nodes[:depth], depth)
            for (id, (nodes, _)), depth in zip(made.items(), depths, strict=True)
            if depth
        }

    def _candidate(self, id: RequestId, offer: Offer) -> tuple[Sequence[int], Candidate]:
        """A tree's drafts in the order that they are taken in, and what they are worth so."""
        guess, survival = offer.guess, offer.source.survival
        is_made, is_drawn = bool(guess.tokens), not self._known[id].params.is_greedy
        if not guess.parents:
            return (), Candidate(survival.chances(id, guess.chances), is_made, is_drawn)
        chances = survival.tree_chances(id, guess.chances, guess.parents)
        found = survivals(chances, guess.parents)
        nodes = sorted(range(1, 1 + len(found)), key=lambda node: (-found[node - 1], node))
        parents = chosen(nodes, guess.parents)
        return nodes, Candidate([chances[node - 1] for node in nodes], is_made, is_drawn, parents)

    def _forget_ended(self, scheduler: Scheduler) -> None:
        """Requests that left without a word to us: finished, aborted, failed."""
        if self._known.keys() <= scheduler.running.keys():
            return
        for id in [id for id in self._known if id not in scheduler.running]:
            if scheduler.waiting.get(id) is None:
                request = self._known.pop(id)
                for source in self._sources:
                    source.forget(request)
                self._read.discard(id)
                self._told.pop(id, None)

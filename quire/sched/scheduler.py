"""Scheduler: who feeds how many tokens in the next step. No tensors, no phases: requests catch up.

A step has a budget of tokens. Requests one token short of caught up (decodes) are served first,
then those in the middle of a prompt, then the waiting line, each with as large a chunk as the
budget leaves. When pages run out, the running request that would be served last goes back to the
line and computes again later. The one that is served first never does, so there is always progress.

`schedule` may run before the last step's result is known (overlap, in `engine/core.py`). It counts
tokens in flight as computed, and sampled tokens that the host has not seen as known; `commit`
settles both. Decodes may carry drafts (`spec/`): guesses fed along, of which `commit` counts those
that were right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from quire.config import SchedConfig
from quire.kv.manager import KVManager
from quire.request import NOT_RUNNING, Request, RequestId
from quire.sched.arrivals import Arrivals
from quire.sched.background import gives_way, has_background, is_all_background, take_back
from quire.sched.costs import StepCosts
from quire.sched.costs_in_use import CostsInUse
from quire.sched.extras import with_extras
from quire.sched.finish import Finish, finish_of, up_to_finish
from quire.sched.gap import prompt_budget
from quire.sched.leftover import Leftover
from quire.sched.neighbours import in_order
from quire.sched.policies import waiting_line
from quire.sched.reading import Reading
from quire.sched.room import Running, beside, by_home, find_home, has_room, num_free
from quire.sched.siblings import drop_unborn
from quire.sched.stats import Counts, SchedStats, stats_of
from quire.sched.window import has_company, seconds_held
from quire.step import Admission, Draft, StepPlan, StepResult, TokenEvent, Work

NO_DRAFTS: Mapping[RequestId, Draft] = MappingProxyType({})


class Scheduler:
    def __init__(
        self,
        config: SchedConfig,
        kv: KVManager,
        clock: Callable[[], float] = time.monotonic,
        costs: StepCosts | None = None,
    ) -> None:
        """`costs` are what a target for the gap between tokens goes by at first."""
        self.config, self.kv, self.clock = config, kv, clock
        self.costs = None if costs is None else CostsInUse(costs)
        self.waiting, self.leftover = waiting_line(config), Leftover(config)
        self.arrivals = Arrivals(kv)  # those whose pages are on their way from another tier
        self.running: dict[RequestId, Request] = {}
        self.max_running = config.max_num_seqs  # lowered while a fault is being pinned down
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._parents: dict[RequestId, Request] = {}  # child -> sibling whose prompt it shares
        self._reading = Reading(kv)
        self.counts = Counts()

    # ------------------------------------------------------------ in and out

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def abort(self, request_id: RequestId, reason: str = "abort") -> list[TokenEvent]:
        """End a request at any moment. Unknown or finished ids give no event."""
        request = self.running.get(request_id) or self._leave_line(request_id)
        if request is None:
            if not drop_unborn([*self.running.values(), *self.waiting], request_id):
                return []
            self.counts.finished += 1
            return [TokenEvent(request_id, (), finish=reason)]
        return [self._end(request, (), Finish(reason))]

    def _leave_line(self, request_id: RequestId) -> Request | None:
        if (request := self.waiting.get(request_id)) is None:
            return self.arrivals.pop(request_id)
        self.waiting.remove(request)
        return request

    def recall(self, request: Request) -> bool:
        """Take it out with the tokens it has, for `add` to bring it back. False: it has ended, or
        is a child that waits in its parent."""
        if request.id in self.running:
            self._preempt(request, {})
        if self._leave_line(request.id) is None:
            return False
        self._parents.pop(request.id, None)
        self.kv.let_go(request)
        return True

    def requeue_running(self) -> list[RequestId]:
        """Send every running request back to the line: a step was lost with all its results."""
        ids = list(self.running)
        for request in list(self.running.values()):
            self._preempt(request, {})
        return ids

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0 or len(self.arrivals) > 0

    # ------------------------------------------------------------ plan

    def schedule(self, drafts: Mapping[RequestId, Draft] = NO_DRAFTS) -> StepPlan:
        """The next step. `drafts` are for requests that decode and whose tokens are all known."""
        self._reading.hash_pages()
        self.arrivals.collect(self.waiting.push)
        works: dict[RequestId, Work] = {}
        preempted = self.counts.preempted
        budget, late = self._plan_decodes(self.config.max_num_batched_tokens, works)
        if drafts:
            budget = self._add_drafts(drafts, budget, works)
        if self.costs is not None and (late or len(self.waiting)):
            fed = self.config.max_num_batched_tokens - budget
            budget = prompt_budget(budget, fed, self.costs.now, self.config.target_gap_ms / 1e3)
        held = budget // 2 if self.waiting.is_owed(self.running) else 0
        for request in late:
            if budget <= held:
                break
            budget -= self._plan(request, self._chunk(request, budget - held), works)
        admissions: list[Admission] = []
        if self.counts.preempted == preempted and not self._holds_admissions():
            self._admit(budget, works, admissions)
        writes, copies = self.kv.take_edits()
        saves, loads = self.kv.take_transfers()
        if works:
            self.counts.steps += 1
        ordered = in_order(works.values(), self.kv, bool(admissions), bool(late))
        by_home(ordered.works, self.running, self.kv)
        edits = (writes, copies, ordered.shares_prefix, saves, loads)
        is_background = is_all_background(ordered.works, self.running)
        return StepPlan(tuple(ordered.works), tuple(admissions), *edits, is_background)

    def _plan_decodes(self, budget: int, works: dict[RequestId, Work]) -> tuple[int, list[Request]]:
        """Plan requests that are one token short; returns the budget left and all other requests.

        The hot loop of a full batch: it spells out what `_plan` and `_launch` do for one token.
        """
        late: list[Request] = []
        max_len, reserve = self.config.max_model_len, self.kv.reserve
        waits_for_draws, running = self.config.waits_for_draws, self.running.values()
        for request in self.leftover.turns(running, self.waiting, waits_for_draws):
            start = request.num_computed + request.num_inflight
            known = len(request.tokens) + request.num_pending
            if known - start > 1:
                late.append(request)
            elif known > start and budget > 0 and request.row != NOT_RUNNING:
                if known - request.num_prompt >= request.max_tokens or known >= max_len:
                    continue  # its last token is in flight
                if reserve(request, start, known):
                    works[request.id] = Work(request.id, request.row, start, 1, True)
                    request.num_inflight += 1
                    request.num_pending += 1
                    self.counts.fed += 1
                    budget -= 1
                else:
                    budget -= self._plan(request, 1, works)
        return budget, late

    def _add_drafts(
        self, drafts: Mapping[RequestId, Draft], budget: int, works: dict[RequestId, Work]
    ) -> int:
        """Let planned decodes feed drafts as well, where pages are free; returns the budget left.

        Nobody loses a page or a place in the step to somebody's guesses."""
        for id, draft in drafts.items():
            work, request = works.get(id), self.running.get(id)
            if work is None or request is None or work.num_tokens > 1 or request.num_pending > 1:
                continue
            num = min(draft.num, budget, self.max_drafts(request))
            if num > 0 and self.kv.reserve(request, work.start, work.start + 1 + num):
                works[id] = work.drafting(draft, num)
                request.num_inflight += num
                self.counts.fed += num
                budget -= num
        return budget

    def max_drafts(self, request: Request) -> int:
        """Most drafts of a request that may all be accepted, with one token drawn after them."""
        known = len(request.tokens)
        left = request.num_prompt + request.max_tokens - known
        return min(left, self.config.max_model_len - known) - 1

    def _chunk(self, request: Request, budget: int, num_cached: int = 0) -> int:
        num_tokens = request.num_to_feed - num_cached
        cap = self.config.max_chunk or num_tokens
        return self.leftover.share(request, min(num_tokens, budget, cap))

    def _plan(self, request: Request, num_tokens: int, works: dict[RequestId, Work]) -> int:
        """Reserve and plan one running request; returns the budget spent, negative if refunded."""
        if not request.is_running:  # lost its row to someone earlier in this same step
            return 0
        refund = 0
        start = request.num_computed + request.num_inflight
        while not self.kv.reserve(request, start, start + num_tokens):
            victim = self.waiting.victim(beside(request.home, self.running, self.kv))
            refund += self._preempt(victim, works)
            if victim is request:
                return -refund
        self._launch(request, start, num_tokens, works)
        return num_tokens - refund

    def _launch(
        self, request: Request, start: int, num_tokens: int, works: dict[RequestId, Work]
    ) -> None:
        sample = start + num_tokens == request.num_known
        works[request.id] = Work(request.id, request.row, start, num_tokens, sample)
        request.num_inflight += num_tokens
        request.num_pending += sample
        self.counts.fed += num_tokens
        self._reading.note(request, num_tokens)

    def _preempt(self, victim: Request, works: dict[RequestId, Work]) -> int:
        work = works.pop(victim.id, None)
        refund = work.num_tokens if work else 0
        self.counts.fed -= refund
        self._leave_row(victim)
        victim.forget_progress()
        victim.num_preempted += 1
        self.counts.preempted += 1
        self.waiting.push(victim)
        return refund

    # ------------------------------------------------------------ admission

    def _holds_admissions(self) -> bool:
        return self.seconds_held() > 0 and not has_company(self.config, self.waiting)

    def seconds_held(self) -> float:
        """How long admissions are still held back; 0 when they are not."""
        return seconds_held(self.config, self.waiting, self.clock())

    def _admit(
        self, budget: int, works: dict[RequestId, Work], admissions: list[Admission]
    ) -> None:
        while len(self.waiting) and budget > 0:
            request = self.waiting.peek()
            if request.id not in self._parents and self.arrivals.hold(request):
                self.waiting.remove(request)
                continue
            has_row = self.leftover.has_row(request, len(self.running), self.max_running)
            spent = self._try_admit(request, budget, works) if has_row else 0
            if spent == 0:
                if has_background(self.running.values()) or self.waiting.is_owed(self.running):
                    self._make_way(request, works)
                break
            budget -= spent
            admissions.append(Admission.of(request))

    def _make_way(self, newcomer: Request, works: dict[RequestId, Work]) -> None:
        """Preempt who must leave for the newcomer; the next step admits it."""
        kv, home, line = self.kv, newcomer.home, self.waiting
        need, has_row = kv.pages_for(newcomer.num_known), len(self.running) < self.max_running
        is_full = not has_row or not has_room(newcomer, home, self.running, kv)
        while (rivals := self._rivals(home)) and gives_way(victim := line.victim(rivals), newcomer):
            self._preempt(victim, works)
            if num_free(kv, home) >= need:
                return
        if is_full or num_free(kv, home) < need:
            owing = line.displaced(self._rivals(home))
            if owing is not None:
                self._preempt(owing, works)

    def _rivals(self, home: int) -> Running:
        """Who has what somebody lacks who would come to this home."""
        has_row = len(self.running) < self.max_running
        return beside(home, self.running, self.kv) if has_row else self.running

    def _try_admit(self, request: Request, budget: int, works: dict[RequestId, Work]) -> int:
        """Give the request a row and pages for all it knows; 0 and no change if none are free."""
        parent = self._parents.get(request.id)
        if not find_home(request, parent, self.running, self.kv):
            return 0
        cached = self.kv.fork(parent, request) if parent else self.kv.match(request)
        assert cached < request.num_known, f"nothing is left to feed: {cached=}"
        num_tokens = self._chunk(request, budget, cached)
        whole = num_tokens == request.num_known - cached
        is_too_few = num_tokens == 0 or (not whole and not self.config.chunked_prefill)
        request.row = self._free_rows[-1]
        if is_too_few or not self.kv.reserve(
            request, cached, cached + num_tokens, ahead=request.num_known
        ):
            self.kv.release(request)
            request.row = NOT_RUNNING
            return 0
        self._free_rows.pop()
        self.waiting.pop(cached)
        self._parents.pop(request.id, None)
        self.running[request.id] = request
        self.kv.admit(request, cached)
        if request.timing.scheduled is None:
            request.timing.scheduled, request.num_cached = self.clock(), cached
        request.num_computed = cached
        # What it had computed before it lost its pages, less what it found again in the cache.
        self.counts.recomputed += max(0, request.num_lost - cached)
        request.num_lost = 0
        self._launch(request, cached, num_tokens, works)
        return num_tokens

    # ------------------------------------------------------------ commit

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Settle a step: advance, publish, finish. Works of requests that left are ignored."""
        now, running = self.clock(), self.running
        if result.is_given_up:
            return take_back(plan.works, running, self.counts)
        events = self._fail(plan, result) if result.failed is not None else []
        for work, tokens in zip(plan.works, result.sampled, strict=True):
            request = running.get(work.request_id)
            if request is None:
                continue  # finished, aborted or preempted while this step was in flight
            request.num_inflight -= work.num_tokens
            request.num_computed += work.num_tokens
            if work.num_drafts:
                request.num_pending -= 1
                events.append(self._verify(request, work, tokens, now))
            elif work.sample:
                request.num_pending -= 1
                events.append(self._advance(request, tokens, now))
            else:
                self.kv.commit(request)
        return with_extras(events, plan, result, running)

    def _fail(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """End requests that cannot go on; the rest of the step is settled as usual."""
        events = []
        for index, message in (result.failed or {}).items():
            request = self.running.get(plan.works[index].request_id)
            if request is not None:
                tokens = result.sampled[index]  # accepted before it failed
                request.tokens.extend(tokens)
                events.append(self._end(request, tokens, Finish("error"))._replace(error=message))
        return events

    def _advance(self, request: Request, tokens: Sequence[int], now: float) -> TokenEvent:
        timing = request.timing
        if timing.first_token is None:
            timing.first_token = now
        timing.last_token = now
        request.tokens.extend(tokens)
        self.counts.output += len(tokens)
        self.kv.commit(request)
        if request.children:
            self._release_children(request)
        finish = finish_of(request, self.config.max_model_len)
        if finish is not None:
            return self._end(request, tokens, finish)
        return TokenEvent(request.id, tokens)

    def _verify(
        self, request: Request, work: Work, tokens: Sequence[int], now: float
    ) -> TokenEvent:
        """Settle a work with drafts: all tokens that came back but the last are drafts."""
        num_accepted = len(tokens) - 1
        request.num_computed -= work.num_drafts - num_accepted
        kept = up_to_finish(request, tokens, self.config.max_model_len)
        if len(kept) < len(tokens):  # as if nothing had been fed behind the end
            request.num_computed -= len(tokens) - len(kept)
            num_accepted = len(kept)
        event = self._advance(request, kept, now)
        request.num_drafted += work.num_drafts
        request.num_accepted += num_accepted
        self.counts.drafted += work.num_drafts
        self.counts.accepted += num_accepted
        return event._replace(num_drafted=work.num_drafts, num_accepted=num_accepted)

    def _release_children(self, parent: Request) -> None:
        for child in parent.children:
            self._parents[child.id] = parent
            self.waiting.push(child)
        parent.children = []

    def _end(self, request: Request, tokens: Sequence[int], finish: Finish) -> TokenEvent:
        if request.children:
            self._release_children(request)
        self._parents.pop(request.id, None)
        self.waiting.ended(request)
        self.kv.let_go(request)
        if request.is_running:
            self._leave_row(request)
            request.row = NOT_RUNNING
        self.counts.finished += 1
        return TokenEvent(request.id, tokens, finish.reason, finish.stop_reason)

    def _leave_row(self, request: Request) -> None:
        del self.running[request.id]
        self.kv.release(request)
        self.kv.let_go(request)
        self._free_rows.append(request.row)

    def stats(self) -> SchedStats:
        computing = sum(r.num_computed + r.num_inflight for r in self.running.values())
        num_waiting = len(self.waiting) + len(self.arrivals)
        return stats_of(self.counts, self.kv, len(self.running), num_waiting, computing)

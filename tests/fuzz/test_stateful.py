"""A state machine over scheduler, page manager and page-content runner: hypothesis drives.

The workloads of `test_workloads.py` follow one script; here the order of additions, aborts,
flushes, bursts and steps is free, and each step chooses its own lag. A failure comes with the
shortest sequence of calls that shows it. Turns red when any such sequence breaks a page invariant,
gives a wrong token, ends a request twice or never, or leaves a page or row behind.
"""

from __future__ import annotations

import random
from collections import Counter, deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quire.config import SchedConfig
from quire.kv.check import check
from quire.kv.groups import PageNeeds, Window
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.scheduler import Scheduler
from quire.step import Pending, StepPlan, TokenEvent
from tests.doubles import VOCAB, FlakyTiers, PageContentRunner, RandomDrafts, oracle_next

MAX_LEN = 32
SHARED = [(i * i + 3 * i) % VOCAB for i in range(MAX_LEN)]  # what prompts begin with
EOS = 3

reached: Counter[str] = Counter()  # what all examples together got to see

tails = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        spare_pages=st.integers(0, 4),
        rows=st.sampled_from([1, 3, 6]),
        budget=st.sampled_from([6, 11, 40]),
        max_chunk=st.sampled_from([0, 0, 3]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        caching=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from([(None,), (None,), (None, 5), (7,), (None, 3, 12), (None, 1)]),
        speculates=st.booleans(),
        has_tiers=st.booleans(),
    )
    def build(
        self,
        page_size: int,
        spare_pages: int,
        rows: int,
        budget: int,
        max_chunk: int,
        policy: str,
        caching: bool,
        windows: tuple[Window, ...],
        speculates: bool,
        has_tiers: bool,
    ) -> None:
        self.drafts = RandomDrafts(random.Random(budget)) if speculates else None
        columns = -(-MAX_LEN // page_size)
        needs = PageNeeds(page_size, windows, max_inflight=2 * budget)
        num_pages = needs.of(MAX_LEN) + spare_pages + 1
        self.now = 0.0
        self.kv = KVManager(num_pages, page_size, caching, windows, secret=bytes(32))
        self.runner = PageContentRunner(num_pages, page_size, rows, columns, windows)
        self.tiers = FlakyTiers(self.runner, random.Random(budget + rows))
        if has_tiers:
            self.kv.connect(self.tiers)
        config = SchedConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=MAX_LEN,
            max_chunk=max_chunk,
            policy=policy,
            priority_aging_s=3.0,
        )
        self.config = config
        self.scheduler = Scheduler(config, self.kv, clock=lambda: self.now)
        self.inflight: deque[tuple[StepPlan, Pending]] = deque()
        self.requests: dict[int, Request] = {}
        self.finished: dict[int, str] = {}

    # ------------------------------------------------------------ rules

    @rule(
        shared=st.integers(0, 24),
        tail=tails,
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 3]),
        salt=st.sampled_from(["", "", "other"]),
        priority=st.integers(0, 2),
        ignores_eos=st.booleans(),
    )
    def add(
        self,
        shared: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        salt: str,
        priority: int,
        ignores_eos: bool,
    ) -> None:
        prompt = (SHARED[:shared] + tail)[: MAX_LEN - 1]
        self._submit(prompt, max_tokens, n, salt, priority, ignores_eos)

    @rule(count=st.integers(2, 6), shared=st.sampled_from([4, 8, 16]), tail=tails)
    def burst(self, count: int, shared: int, tail: list[int]) -> None:
        """Equal and almost equal prompts in the same instant: concurrent identical pages."""
        for i in range(count):
            self._submit([*SHARED[:shared], *tail, i % 2], 4, 1, "", 0, True)

    @rule(first=st.integers(0, VOCAB - 1))
    def press(self, first: int) -> None:
        """A prompt as long as the context, unlike all others: evicts most of what is cached."""
        prompt = [(first + 5 * i) % VOCAB for i in range(MAX_LEN - 3)]
        self._submit(prompt, 2, 1, "pressure", 1, True)

    @precondition(lambda self: self.scheduler.has_work or self.inflight)
    @rule(lag=st.sampled_from([0, 1]))
    def step(self, lag: int) -> None:
        self._step(lag)

    @precondition(lambda self: self.scheduler.has_work)
    @rule(count=st.integers(3, 9), lag=st.sampled_from([0, 1]))
    def steps(self, count: int, lag: int) -> None:
        """Drafts are made for requests with nothing in flight: mostly where no step lags."""
        for _ in range(count):
            self._step(lag)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        """Anyone, finished ones too."""
        id = sorted(self.requests)[pick % len(self.requests)]
        events = self.scheduler.abort(id)
        assert len(events) == (id not in self.finished)
        self._take(events)
        reached["aborted in flight"] += bool(events and self.requests[id].num_inflight)

    @rule()
    def flush(self) -> None:
        reached["flushed"] += self.kv.flush()

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # ------------------------------------------------------------ always

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "kv"):
            check(self.kv)
            running = self.scheduler.running
            assert set(self.kv.holdings()) == set(running)
            rows = [request.row for request in running.values()]
            free = self.scheduler._free_rows
            assert sorted(rows + free) == list(range(self.config.max_num_seqs))

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for _ in range(3000):
            if not self.scheduler.has_work and not self.inflight:
                break
            self._step(lag=1)
            check(self.kv)
        assert set(self.finished) == set(self.requests), "someone never ended"
        assert self.kv.allocator.num_live == 0, "pages leaked"
        assert not self.tiers.pinned and not self.tiers.arriving, "kept for nobody"
        assert len(self.scheduler._free_rows) == self.config.max_num_seqs, "rows leaked"
        assert not self.scheduler._parents and not self.scheduler.waiting.num_tokens
        for id, request in self.requests.items():
            want = self._expected(request)
            if self.finished[id] == "abort":
                want = want[: request.num_output]
            assert request.output == want
        self.kv.flush()
        assert self.kv.allocator.num_empty == self.kv.allocator.num_pages
        assert not self.kv.tree.nodes
        stats = self.scheduler.stats()
        reached["preempted"] += stats.num_preempted
        reached["drafts accepted"] += stats.num_accepted_tokens
        reached["copied"] += stats.pages_copied
        reached["evicted"] += stats.pages_evicted
        reached["hit"] += stats.prefix_hit_tokens
        reached["deduplicated"] += self.kv.counts.shared_pages
        reached["loaded"] += self.runner.num_loaded
        reached["behind a window"] += self.kv.counts.window_pages

    # ------------------------------------------------------------ inside

    def _submit(
        self, prompt: list[int], max_tokens: int, n: int, salt: str, priority: int, free: bool
    ) -> None:
        family = []
        for index in range(n):
            id = len(self.requests) + 1
            request = Request.new(
                id,
                prompt,
                SamplingParams(max_tokens=max_tokens, ignore_eos=free),
                max_tokens=min(max_tokens, MAX_LEN - len(prompt)),
                eos_ids=[EOS],
                priority=priority,
                cache_salt=salt,
                seed=index,
                arrival=self.now,
            )
            request.tenant, request.weight = str(priority), 1.0 + priority
            self.requests[id] = request
            family.append(request)
        family[0].children = family[1:]
        self.scheduler.add(family[0])

    def _step(self, lag: int) -> None:
        """As `EngineCore.step`, with the lag a matter of the moment."""
        self.now += 0.1
        made = self.drafts.make(self.scheduler) if self.drafts else {}
        plan = self.scheduler.schedule(made)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        self.inflight.append((plan, self.runner.execute(plan)))
        while len(self.inflight) > (lag if plan.works else 0):
            settled, pending = self.inflight.popleft()
            self._take(self.scheduler.commit(settled, pending.result()))

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.finished, "news of a finished request"
            if event.finish is not None:
                self.finished[event.request_id] = event.finish

    @staticmethod
    def _expected(request: Request) -> list[int]:
        tokens = request.tokens[: request.num_prompt].tolist()
        for _ in range(request.max_tokens):
            tokens.append(oracle_next(tokens, request.seed))
            if tokens[-1] in request.eos_ids and not request.params.ignore_eos:
                break
        return tokens[request.num_prompt :]


def test_engine_machine() -> None:
    reached.clear()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=400,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # The machine must reach the hard parts, or the test proves nothing.
    for what, least in {
        "preempted": 30,
        "hit": 1000,
        "copied": 20,
        "evicted": 200,
        "deduplicated": 50,
        "flushed": 50,
        "aborted in flight": 10,
        "behind a window": 200,
        "drafts accepted": 500,
        "loaded": 200,
    }.items():
        assert reached[what] >= least, reached

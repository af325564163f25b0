"""Step costs: steps of many kinds timed on this device, and the table fitted to them.

Decodes of several batches and contexts, chunks of prompts at several places, both together; through
`execute`, as every step. What the engine spends around a step is timed on a run of its own. For
engines that serve nobody yet: rows and pages are written to. `sched/cost_table.py` says what the
numbers mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from quire.bench.offline import greedy
from quire.engine.build import Engine
from quire.errors import NotSupported
from quire.request import Request, RequestId
from quire.runner.runner import ModelRunner
from quire.sched.cost_table import CostTable, EngineFacts, Load, Point
from quire.sched.costs import StepCosts
from quire.step import Admission, PageWrite, StepPlan, Work

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (16, 256, 1024, 4096)
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STARTS = (0, 512, 2048)
MIXED = ((1, 32), (4, 64), (16, 128), (8, 256))  # decodes, and a chunk beside them
REPEATS = 5
MOST_S = 2.0  # for one kind of step; larger ones are left out
HOST_TOKENS = 24


class Kind(NamedTuple):
    """A step: so many decodes with a context, and a chunk that begins at a place."""

    decodes: int = 0
    context: int = 0
    chunk: int = 0
    start: int = 0

    @property
    def num_rows(self) -> int:
        return self.decodes + (self.chunk > 0)

    @property
    def longest(self) -> int:
        return max(self.context + 1 if self.decodes else 0, self.start + self.chunk)


def measure_costs(
    engine: Engine,
    model: str,
    note: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """`clock`: with one thread, `time.process_time` does not count what others do meanwhile."""
    if engine.runner.model.ranks.has_homes:
        raise NotSupported(
            f"got data_parallel_size={engine.runner.model.ranks.size}: a step takes as long as the"
            " rank that attends most, which a table of costs does not know; use"
            " tensor_parallel_size, or one rank"
        )
    probe = StepProbe(engine.runner, clock)
    loads, times = [], []
    for kind in kinds(engine):
        plan = probe.plan(kind)
        if plan is None:
            continue
        seconds = probe.seconds(plan)
        loads.append(Load.of(plan))
        times.append(seconds)
        note(f"{kind.decodes} decodes at {kind.context}, {kind.chunk} at {kind.start}:"
             f" {seconds * 1e3:.2f} ms")  # fmt: skip
    probe.forget()
    return fit(facts_of(engine, model), loads, times, *host_costs(engine, clock), by_form=True)


def kinds(engine: Engine) -> Iterator[Kind]:
    budget, seqs = engine.config.sched.max_num_batched_tokens, engine.config.sched.max_num_seqs
    for context in CONTEXTS:
        yield from (Kind(b, context) for b in BATCHES if b <= min(budget, seqs))
    for start in STARTS:
        yield from (Kind(chunk=c, start=start) for c in CHUNKS if c <= budget)
    for decodes, chunk in MIXED:
        if decodes + chunk <= budget and decodes < seqs:
            yield Kind(decodes, CONTEXTS[1], chunk)


def facts_of(engine: Engine, model: str) -> EngineFacts:
    sched, cache = engine.config.sched, engine.config.cache
    return EngineFacts(
        model=model,
        device=engine.config.device,
        ranks=engine.runner.model.ranks.size,
        overlaps=engine.core.lag > 0,
        max_num_seqs=sched.max_num_seqs,
        max_num_batched_tokens=sched.max_num_batched_tokens,
        max_model_len=sched.max_model_len,
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        windows=tuple(engine.runner.pool.groups.windows),
        token_bytes=cache.token_bytes,
    )


class StepProbe:
    """Steps on the first rows and pages; all rows read the same pages, which costs the same."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self.runner, self.size, self.clock = runner, runner.spec.page_size, clock
        groups = len(runner.pool.groups)
        self.room = min(
            runner.rows.max_len - 1, self.size * ((runner.pool.num_pages - 1) // groups)
        )

    def plan(self, kind: Kind) -> StepPlan | None:
        """None: it does not fit the engine."""
        if kind.longest > self.room or kind.num_rows > self.runner.rows.max_rows:
            return None
        lens = [kind.context + 1] * kind.decodes + [kind.start + kind.chunk] * (kind.chunk > 0)
        self._admit(lens)
        works = [Work(RequestId(i), i, kind.context, 1, True) for i in range(kind.decodes)]
        if kind.chunk:
            row = kind.decodes
            works.append(Work(RequestId(row), row, kind.start, kind.chunk, True))
        return StepPlan(tuple(works))

    def seconds(self, plan: StepPlan) -> float:
        """The median of several; the first is for warming."""
        times: list[float] = []
        for _ in range(1 + REPEATS):
            begun = self.clock()
            self.runner.execute(plan).result()
            times.append(self.clock() - begun)
            if sum(times) > MOST_S and len(times) > 1:
                break
        return float(np.median(times[1:]))

    def forget(self) -> None:
        self.runner.rows.page_tables.zero_()  # of pages that nobody holds

    def _admit(self, lens: Sequence[int]) -> None:
        admissions, writes = [], []
        num_groups, longest = len(self.runner.pool.groups), -(-max(lens) // self.size)
        for row, length in enumerate(lens):
            tokens = [(row + i) % 97 for i in range(length)]
            admissions.append(Admission(RequestId(row), row, tokens, length, greedy(1), 0, ()))
            writes += [
                PageWrite(row, column, 1 + group * longest + column, group)
                for group in range(num_groups)
                for column in range(-(-length // self.size))
            ]
        plan = StepPlan(admissions=tuple(admissions), page_writes=tuple(writes))
        self.runner.execute(plan).result()


def host_costs(engine: Engine, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step, and of each request in it, that `execute` and its result do not take."""
    few, many = 1, min(16, engine.config.sched.max_num_seqs)
    one = _host_seconds(engine, few, clock)
    if many == few:
        return one, 0.0
    each = max(0.0, (_host_seconds(engine, many, clock) - one) / (many - few))
    return max(0.0, one - each), each


def _host_seconds(engine: Engine, count: int, clock: Callable[[], float]) -> float:
    """The median over the decodes of so many requests."""
    core, spent = engine.core, 0.0
    for i in range(count):
        core.add(Request.new(i, [7, i + 1], greedy(HOST_TOKENS)))
    times = []
    while core.has_work:
        begun = clock()
        plan = core.scheduler.schedule()
        middle = clock()
        result = engine.runner.execute(plan).result()
        spent = clock() - middle
        core.scheduler.commit(plan, result)
        if len(plan.works) == count and plan.num_tokens == count:
            times.append(clock() - begun - spent)
    return float(np.median(times)) if times else 0.0


def fit(
    facts: EngineFacts,
    loads: Sequence[Load],
    times: Sequence[float],
    host_s: float = 0.0,
    host_work_s: float = 0.0,
    *,
    by_form: bool = False,
) -> CostTable:
    """Least squares of relative errors, no coefficient below zero. `by_form`: steps with a part of
    a prompt get a base of their own, if there are such and others; what drawing takes is in these
    bases then, since decodes draw as many tokens as they feed."""
    forms = [by_form and load.pairs > 0 for load in loads]
    if all(forms):
        forms = [False] * len(loads)
    knots = sorted({(form, load.tokens) for form, load in zip(forms, loads, strict=True)})
    wanted = np.asarray(times)
    made = [
        _row((form, load.tokens), load, knots, draws=not by_form)
        for form, load in zip(forms, loads, strict=True)
    ]
    found = _non_negative(np.asarray(made) / wanted[:, None], np.ones(len(loads)))
    context_s, pair_s, sample_s = found[len(knots) :].tolist()
    bases = found[: len(knots)].tolist()
    decodes, prompts = (
        [(tokens, base) for (form, tokens), base in zip(knots, bases, strict=True) if form == which]
        for which in (False, True)
    )
    base = StepCosts.of(decodes)  # never falling
    table = CostTable(
        facts, base.tokens, base.times, context_s, pair_s, sample_s, host_s, host_work_s
    )
    if prompts:
        own = StepCosts.of(prompts)
        table = msgspec.structs.replace(table, prompt_tokens=own.tokens, prompt_times=own.times)
    pairs = zip(loads, times, strict=True)
    points = tuple(Point(load, seconds, table.seconds(load)) for load, seconds in pairs)
    return msgspec.structs.replace(table, points=points)


def _row(
    own: tuple[bool, int], load: Load, knots: Sequence[tuple[bool, int]], draws: bool
) -> list[float]:
    """One where a step's size is a knot, then what the slopes are for."""
    slopes = [float(load.context), load.pairs, float(load.samples) if draws else 0.0]
    return [float(own == knot) for knot in knots] + slopes


def _non_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares; columns that would be negative are taken out, the worst first."""
    active = list(range(rows.shape[1]))
    while True:
        scale = np.abs(rows[:, active]).max(0)
        scale[scale == 0.0] = 1.0
        part, *_ = np.linalg.lstsq(rows[:, active] / scale, wanted, rcond=None)
        part = part / scale
        if part.min() >= 0.0 or len(active) == 1:
            break
        active.pop(int(np.argmin(part * scale)))
    found = np.zeros(rows.shape[1])
    found[active] = np.maximum(part, 0.0)
    return found

"""Baselines against the page-content runner: memory must be right, not only the speed wrong."""

from __future__ import annotations

from typing import cast

import pytest

from quire.bench.baselines import ContiguousScheduler, RowLayout
from quire.bench.drive import drive, paged_use
from quire.bench.offline import greedy
from quire.bench.workload import Job, Span, random_jobs
from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.kv.manager import KVManager
from quire.request import Request
from quire.sched.scheduler import Scheduler
from quire.step import StepResult
from tests.doubles import VOCAB, PageContentRunner, oracle_next

SIZE, PER_ROW, ROWS = 4, 8, 3
MAX_LEN = SIZE * PER_ROW
NUM_PAGES = ROWS * PER_ROW + 1
FULL = random_jobs(3, Span(12, 12), Span(MAX_LEN - 12, MAX_LEN - 12), VOCAB, seed=4)
JOBS = [*FULL, *random_jobs(9, Span(2, 12), Span(1, 18), VOCAB, seed=3)]


def run(scheduler, jobs=JOBS):
    runner = PageContentRunner(NUM_PAGES, SIZE, max_rows=8, max_pages=PER_ROW)
    look = getattr(scheduler, "use", None) or (lambda: paged_use(scheduler))
    return drive(EngineCore(cast(Scheduler, scheduler), runner, overlap=False), jobs, look)


def contiguous(rows=ROWS, **options):
    return ContiguousScheduler(RowLayout(rows, PER_ROW, SIZE), MAX_LEN, **options)


def paged(**options):
    config = SchedConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_LEN)
    return Scheduler(config, KVManager(NUM_PAGES, SIZE, **options))


def expected(job: Job) -> list[int]:
    tokens = list(job.prompt)
    for _ in range(job.num_output):
        tokens.append(oracle_next(tokens))
    return tokens[len(job.prompt) :]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: contiguous(1, refills=True, keeps_cache=False),
        lambda: contiguous(1, refills=True),
        lambda: contiguous(refills=False),
        lambda: contiguous(refills=True),
        paged,
        lambda: paged(prefix_caching=False),
    ],
    ids=["no cache", "kv cache", "static", "continuous", "prefix", "paged"],
)
def test_every_scheduler_gives_the_oracles_tokens(scheduler):
    found = run(scheduler())
    assert [found.outputs[i] for i in range(len(JOBS))] == [expected(job) for job in JOBS]


def test_without_a_cache_every_step_starts_over():
    scheduler = contiguous(1, refills=True, keeps_cache=False)
    scheduler.add(Request.new(0, [1, 2, 3], greedy(4)))
    fed = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        fed += [(work.start, work.num_tokens) for work in plan.works]
        scheduler.commit(plan, StepResult([(5,)]))
    assert fed == [(0, 3), (0, 4), (0, 5), (0, 6)]


def test_static_waits_for_the_longest_and_continuous_does_not():
    jobs = [Job((1, 2), 16 if i % 3 == 0 else 2) for i in range(9)]
    static, continuous = run(contiguous(refills=False), jobs), run(contiguous(refills=True), jobs)
    assert static.num_steps == 3 * 16
    assert continuous.num_steps < static.num_steps
    assert static.waste > continuous.waste


def test_a_static_batch_keeps_its_reservation_to_the_end():
    scheduler = contiguous(refills=False)
    found = run(scheduler, [Job((1,), 1), Job((1,), 9), Job((1,), 1)])
    assert {look.reserved for look in found.looks[:-1]} == {ROWS * MAX_LEN}
    assert found.looks[-1].reserved == 0


def test_pages_waste_less_than_reservations():
    reserved, on_demand = run(contiguous(refills=True)), run(paged(prefix_caching=False))
    assert on_demand.waste < reserved.waste / 2
    assert on_demand.peak_running > reserved.peak_running == ROWS


def test_gaps_and_first_tokens_are_per_request():
    found = run(contiguous(refills=True))
    assert len(found.ttfts) == len(JOBS)
    assert len(found.gaps) == sum(job.num_output - 1 for job in JOBS)
    assert min(found.gaps) >= 0

"""Chunk times: how long steps that feed parts of a prompt take here, measured through `execute`.

The table is what `sched/gap.py` goes by. For engines that have not served anybody yet: row 0 and
the first pages are written to. It takes a fraction of a second; sizes beyond that go along the last
line.
"""

from __future__ import annotations

import time

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.runner import ModelRunner
from quire.sched.costs import StepCosts
from quire.step import Admission, PageWrite, StepPlan, Work

SIZES = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
REPEATS = 3
ENOUGH_S = 0.4


def chunk_times(runner: ModelRunner, most_tokens: int) -> StepCosts:
    size, num_groups = runner.spec.page_size, len(runner.pool.groups)
    room = min(runner.rows.max_len - 1, size * ((runner.pool.num_pages - 1) // num_groups))
    most = min(most_tokens, room)
    num_pages = -(-most // size)
    writes = tuple(
        PageWrite(0, column, 1 + group * num_pages + column, group)
        for group in range(num_groups)
        for column in range(num_pages)
    )
    params = SamplingParams(temperature=0.0, max_tokens=1)
    admission = Admission(RequestId(0), 0, [0] * most, most, params, 0, ())
    runner.execute(StepPlan(admissions=(admission,), page_writes=writes)).result()
    measured: list[tuple[int, float]] = []
    spent = 0.0  # without what is compiled or captured on the way
    for count in (size for size in SIZES if size <= most):
        if spent > ENOUGH_S and len(measured) > 1:
            break
        measured.append((count, _seconds(runner, count)))
        spent += REPEATS * measured[-1][1]
    runner.rows.page_tables.zero_()  # of pages that nobody holds
    return StepCosts.of(measured)


def _seconds(runner: ModelRunner, count: int) -> float:
    """The shortest of several, as others may run too; the first one is for warming."""
    work = Work(RequestId(0), 0, 0, count, True)
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        runner.execute(StepPlan((work,))).result()
        times.append(time.perf_counter() - begun)
        if len(times) > 1 and times[-1] > ENOUGH_S / REPEATS:
            break  # large steps are steady
    return min(times)

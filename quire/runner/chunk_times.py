"""Chunk times: how long steps that feed parts of a prompt take here, measured through `execute`.

The table is what `sched/gap.py` goes by at first. Sizes are measured in rounds (`rounds.py`). For
engines that have not served anybody yet: row 0 and the first pages are written to. It takes about a
second; sizes beyond that, or beyond what one request may have, go along the last line.
"""

from __future__ import annotations

from functools import partial

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.rounds import affordable, least_of_rounds
from quire.runner.runner import ModelRunner
from quire.sched.costs import StepCosts
from quire.step import Admission, PageWrite, StepPlan, Work

SIZES = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
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
    sizes = [*(size for size in SIZES if size < most), most]
    steps = [partial(_run, runner, count) for count in sizes]
    num = affordable(steps, ENOUGH_S, 2)
    measured = least_of_rounds(steps[:num], ENOUGH_S)
    runner.rows.page_tables.zero_()  # of pages that nobody holds
    costs = StepCosts.of(zip(sizes, measured, strict=False))
    if costs.tokens[-1] == most_tokens:
        return costs
    # A size of their own for what follows: an error there is none of the last one measured.
    last = (most_tokens, costs.seconds(most_tokens))
    return StepCosts.of([*zip(costs.tokens, costs.times, strict=True), last])


def _run(runner: ModelRunner, count: int) -> None:
    runner.execute(StepPlan((Work(RequestId(0), 0, 0, count, True),))).result()

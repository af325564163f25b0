"""Scheduler: microseconds of Python in every step with 256 requests running. No model, no torch.

The real Scheduler and KVManager plan for a runner that answers at once, so what is timed is the
bookkeeping alone, as CPU time of this thread: other jobs on the machine do not count. Two loads:
steady decoding, and churn, where about a tenth of the requests finishes in every step and new
prompts take their rows.

    python benchmarks/scheduler.py [--steps 600] [--profile]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from quire.config import SchedConfig
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.scheduler import Scheduler
from quire.step import StepPlan, StepResult

NUM_RUNNING = 256
PAGE_SIZE = 16
PROMPT_LEN = 128
VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Times:
    """Medians and 99th percentiles in microseconds."""

    schedule: float
    commit: float
    total: float
    total_p99: float


def null_result(plan: StepPlan, tokens: Iterator[int]) -> StepResult:
    return StepResult([(next(tokens),) if work.sample else () for work in plan.works])


def make_scheduler(max_len: int) -> Scheduler:
    config = SchedConfig(
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=8192,
        max_model_len=max_len,
    )
    pages = NUM_RUNNING * (max_len // PAGE_SIZE) + 1
    return Scheduler(config, KVManager(pages, PAGE_SIZE))


def requests(rng: random.Random, num_output: int, spread: int) -> Iterator[Request]:
    """Endless distinct prompts; outputs of num_output +- spread tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for id in itertools.count():
        # Lengths over two pages' span, so that in every step some requests fill a page.
        num_prompt = PROMPT_LEN + rng.randrange(2 * PAGE_SIZE)
        prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
        length = num_output + rng.randint(-spread, spread)
        yield Request.new(id, prompt, params, max_tokens=length, arrival=float(id))


def measure(scheduler: Scheduler, source: Iterator[Request], num_steps: int) -> Times:
    """Keep all rows busy; the first steps, which read the prompts, are not counted."""
    rng = random.Random(1)
    tokens = iter(lambda: rng.randrange(VOCAB), None)
    schedule_us: list[float] = []
    commit_us: list[float] = []
    for step in range(num_steps + 30):
        while len(scheduler.running) + len(scheduler.waiting) < NUM_RUNNING:
            scheduler.add(next(source))
        start = time.thread_time_ns()
        plan = scheduler.schedule()
        planned = time.thread_time_ns()
        result = null_result(plan, tokens)
        answered = time.thread_time_ns()
        scheduler.commit(plan, result)
        done = time.thread_time_ns()
        if step >= 30:
            schedule_us.append((planned - start) / 1000)
            commit_us.append((done - answered) / 1000)
    total = sorted(a + b for a, b in zip(schedule_us, commit_us, strict=True))
    return Times(
        statistics.median(schedule_us),
        statistics.median(commit_us),
        statistics.median(total),
        total[int(len(total) * 0.99)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    gc.disable()  # a collection now and then would be noise in single steps
    rng = random.Random(0)
    steady = (make_scheduler(PROMPT_LEN + args.steps + 128), requests(rng, 1 << 20, 0))
    churn = (make_scheduler(1024), requests(rng, 10, 5))
    if args.profile:
        import cProfile
        import pstats

        for load in (steady, churn):
            profile = cProfile.Profile()
            profile.runcall(measure, *load, args.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        return
    still, moving = measure(*steady, args.steps), measure(*churn, args.steps)
    record = {
        "what": "scheduler",
        "running": NUM_RUNNING,
        "steps": args.steps,
        "schedule_us": round(still.schedule, 1),
        "commit_us": round(still.commit, 1),
        "total_us": round(still.total, 1),
        "total_p99_us": round(still.total_p99, 1),
        "churn_schedule_us": round(moving.schedule, 1),
        "churn_commit_us": round(moving.commit, 1),
        "churn_total_us": round(moving.total, 1),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()

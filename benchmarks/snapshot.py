"""What a look inside the engine costs: 60,000 pages, 256 running requests, no model.

    python -m benchmarks.snapshot [--looks 40]

Prints one JSON line. The first look builds what later ones keep up to date.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.engine.snapshot import Snapshots
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.scheduler import Scheduler
from quire.step import StepPlan, StepResult

NUM_PAGES, NUM_RUNNING, NUM_SHARED = 60_000, 256, 512


class Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class InstantRunner:
    """Answers every step at once with the same token."""

    def execute(self, plan: StepPlan) -> Done:
        return Done(StepResult([(5,) if work.sample else () for work in plan.works]))


def busy_core() -> EngineCore:
    """Live, cached and empty pages by the ten thousand."""
    config = SchedConfig(
        max_num_seqs=NUM_RUNNING, max_num_batched_tokens=1 << 20, max_model_len=4096
    )
    core = EngineCore(
        Scheduler(config, KVManager(NUM_PAGES + 1, 16)), InstantRunner(), overlap=False
    )
    rng = random.Random(0)
    shared = [rng.randrange(50_000) for _ in range(NUM_SHARED)]
    for max_tokens in (1, 2000):  # the first wave stays behind as cached pages
        for id in range(NUM_RUNNING):
            prompt = shared + [rng.randrange(50_000) for _ in range(1300)]
            params = SamplingParams(max_tokens=max_tokens)
            core.add(Request.new(id + max_tokens * 1000, prompt, params))
        core.step()
    return core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--looks", type=int, default=40)
    num_looks = parser.parse_args().looks
    core = busy_core()
    snapshots, costs = Snapshots(core), []
    for _ in range(num_looks):
        for _ in range(4):
            core.step()
        snapshots.observe(core.last_plan, 0.01)
        begun = time.thread_time()
        snapshots.take()
        costs.append((time.thread_time() - begun) * 1e3)
    later = sorted(costs[1:])
    print(
        json.dumps(
            {
                "what": "snapshot of 60,000 pages and 256 running requests",
                "first_ms": round(costs[0], 2),
                "median_ms": round(statistics.median(later), 2),
                "p90_ms": round(later[len(later) * 9 // 10], 2),
            }
        )
    )


if __name__ == "__main__":
    main()

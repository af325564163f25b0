"""Random workloads against the page-content runner, with and without overlap.

Turns red when pages are lost, read before written, shared and overwritten, published unverified,
when a preempted request stays in a plan, or when progress stops.
"""

from __future__ import annotations

import random

import pytest

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.kv.check import check
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import Request
from quire.sched.scheduler import Scheduler
from tests.doubles import PageContentRunner, oracle_next

LONGEST = 40 + 20 + 12


def make_requests(rng: random.Random) -> list[Request]:
    shared = [rng.randrange(7) for _ in range(40)]
    requests, id = [], 0
    for arrival in range(12):
        prompt = shared[: rng.randint(0, 40)] + [
            rng.randrange(7) for _ in range(rng.randint(1, 20))
        ]
        n = rng.choice([1, 1, 1, 3])
        max_tokens, salt = rng.randint(1, 12), rng.choice(["", "", "", "salted"])
        family = []
        for _ in range(n):
            id += 1
            family.append(
                Request.new(
                    id,
                    prompt,
                    SamplingParams(max_tokens=max_tokens, ignore_eos=rng.random() < 0.8),
                    eos_ids=[3],
                    priority=rng.randint(0, 2),
                    cache_salt=salt,
                    seed=rng.randint(0, 6),
                    arrival=float(arrival),
                )
            )
        family[0].children = family[1:]
        requests.append(family[0])
    return requests


def expected(request: Request) -> list[int]:
    tokens = request.tokens[: request.num_prompt].tolist()
    for _ in range(request.max_tokens):
        tokens.append(oracle_next(tokens, request.seed))
        if tokens[-1] in request.eos_ids and not request.params.ignore_eos:
            break
    return tokens[request.num_prompt :]


def run(seed: int, *, overlap: bool, caching: bool = True) -> dict[str, int]:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 8])
    max_rows = rng.choice([1, 4, 8])
    max_pages = -(-LONGEST // size)
    num_pages = max_pages + 1 + rng.randint(0, 6)
    config = SchedConfig(
        max_num_seqs=max_rows,
        max_num_batched_tokens=max(max_rows, rng.choice([4, 16, 64])),
        max_model_len=LONGEST,
        max_chunk=rng.choice([0, 0, 3, 8]),
        policy=rng.choice(["fcfs", "priority"]),
        priority_aging_s=4.0,
    )
    kv = KVManager(num_pages, size, caching)
    runner = PageContentRunner(num_pages, size, max_rows, max_pages)
    now = [0.0]
    scheduler = Scheduler(config, kv, clock=lambda: now[0])
    core = EngineCore(scheduler, runner, overlap)
    todo = make_requests(rng)
    everyone = {r.id: r for family in todo for r in [family, *family.children]}
    finished: dict[int, str] = {}
    aborted: set[int] = set()
    for _ in range(20_000):
        now[0] += 0.1
        while todo and rng.random() < 0.5:
            core.add(todo.pop(0))
        if rng.random() < 0.03:
            victim = rng.choice(list(everyone))
            for event in core.abort(victim):
                assert event.request_id not in finished
                finished[event.request_id] = event.finish
                aborted.add(event.request_id)
        for event in core.step():
            assert event.request_id not in finished, "news of a finished request"
            if event.finish:
                finished[event.request_id] = event.finish
        check(kv)
        if not todo and not core.has_work:
            break
    else:
        raise AssertionError("no progress")
    assert set(finished) == set(everyone), "a request never ended"
    for id, request in everyone.items():
        want = expected(request)
        if id in aborted:
            assert request.output == want[: request.num_output]
        else:
            assert request.output == want, (seed, id)
    assert kv.allocator.num_live == 0, "pages leaked"
    stats = scheduler.stats()
    return {
        "preempted": stats.num_preempted,
        "hits": stats.prefix_hit_tokens,
        "copied": stats.pages_copied,
        "evicted": stats.pages_evicted,
    }


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_random_workloads(overlap: bool) -> None:
    totals = {"preempted": 0, "hits": 0, "copied": 0, "evicted": 0}
    for seed in range(250):
        for name, count in run(seed, overlap=overlap).items():
            totals[name] += count
    # The workloads must reach the hard parts, or the test proves nothing.
    assert totals["preempted"] > 100, totals
    assert totals["hits"] > 1000, totals
    assert totals["copied"] > 50, totals
    assert totals["evicted"] > 1000, totals


def test_without_prefix_cache() -> None:
    for seed in range(60):
        run(seed, overlap=True, caching=False)

"""Random workloads against the page-content runner, with and without overlap.

Turns red when pages are lost, read before written, shared and overwritten, published unverified,
when a preempted request stays in a plan, or when progress stops. With several layer groups also
when a window loses a page it still needs, or keeps one it does not.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import pytest

from quire.config import SchedConfig
from quire.engine.core import EngineCore
from quire.kv.check import check
from quire.kv.groups import PageNeeds, Window
from quire.kv.manager import KVManager
from quire.params import SamplingParams
from quire.request import BACKGROUND, Request
from quire.sched.scheduler import Scheduler
from quire.step import StepPlan
from tests.doubles import FlakyTiers, PageContentRunner, RandomDrafts, oracle_next

LONGEST = 40 + 20 + 12

# Shorter than a page, than a chunk, than most prompts, than none; with and without full layers.
WINDOWS: list[tuple[Window, ...]] = [
    (None, 5),
    (None, 1),
    (None, 9, 9, 24),
    (None, None, 16),
    (7,),
    (6, 13),
    (None, 100),
]


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
        for request in family:
            request.tenant, request.weight = str(arrival % 3), 1.0 + arrival % 3
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


def assert_bounded(kv: KVManager, needs: PageNeeds) -> None:
    """No group of any request holds more than the most that memory was planned for."""
    for held in kv.look().values():
        for table, first, window in zip(held.tables, held.firsts, kv.windows, strict=True):
            assert len(table) - first <= needs.in_group(window, LONGEST)


def assert_neighbours(plan: StepPlan, scheduler: Scheduler) -> None:
    """Works of a home lie side by side, the first home's first; of requests that still run."""
    running = scheduler.running
    homes = [running[work.request_id].home for work in plan.works if work.request_id in running]
    assert homes == sorted(homes), homes


def run(
    seed: int,
    *,
    overlap: int,
    caching: bool = True,
    windows: tuple[Window, ...] = (None,),
    background: bool = False,
    is_fair: bool = False,
    speculates: bool = False,
    has_tiers: bool = False,
    has_stages: bool = False,
    num_homes: int = 1,
) -> dict[str, int]:
    rng = random.Random(seed)
    drafts = RandomDrafts(random.Random(seed)) if speculates else None
    size = rng.choice([1, 2, 4, 8])
    max_rows = rng.choice([1, 4, 8])
    max_pages = -(-LONGEST // size)
    budget = max(max_rows, rng.choice([4, 16, 64]))
    # The least that the engine accepts, and a little more: preemption and eviction all the time.
    needs = PageNeeds(size, windows, max_inflight=budget * (1 + overlap))
    num_pages = needs.of(LONGEST) + 1 + rng.randint(0, 6)
    config = SchedConfig(
        max_num_seqs=max_rows,
        max_num_batched_tokens=budget,
        max_model_len=LONGEST,
        max_chunk=rng.choice([0, 0, 3, 8]),
        policy="fair" if is_fair else rng.choice(["fcfs", "priority"]),
        priority_aging_s=4.0,
        waits_for_draws=has_stages,
    )
    kv = KVManager(num_pages, size, caching, windows, bytes(32), num_homes)
    every_page = kv.allocator.num_pages + 1
    runner = PageContentRunner(every_page, size, max_rows, max_pages, windows)
    tiers = FlakyTiers(runner, random.Random(seed))
    if has_tiers:
        kv.connect(tiers)
    now = [0.0]
    scheduler = Scheduler(config, kv, clock=lambda: now[0])
    core = EngineCore(scheduler, runner, overlap, drafts=drafts)
    todo = make_requests(rng)
    for family in todo if background else ():
        if family.id % 3 == 0:
            for member in [family, *family.children]:
                member.priority = BACKGROUND
    everyone = {r.id: r for family in todo for r in [family, *family.children]}
    finished: dict[int, str] = {}
    aborted: set[int] = set()
    homes_of: defaultdict[int, set[int]] = defaultdict(set)
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
        for admission in core.last_plan.admissions:
            homes_of[admission.request_id].add(admission.home)
        assert_neighbours(core.last_plan, scheduler)
        assert_bounded(kv, needs)
        if tiers.runner.saved and rng.random() < 0.05:
            tiers.lose(rng.choice(list(tiers.runner.saved)))
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
    assert not tiers.pinned and not tiers.arriving, "something outside the pool leaked"
    stats = scheduler.stats()
    return {
        "preempted": stats.num_preempted,
        "hits": stats.prefix_hit_tokens,
        "copied": stats.pages_copied,
        "evicted": stats.pages_evicted,
        "moved": kv.counts.window_pages,
        "notes": sum("only a window" in r.cache_note for r in everyone.values()),
        "drafted": stats.num_drafted_tokens,
        "accepted": stats.num_accepted_tokens,
        "steps": stats.num_steps,
        "loaded": runner.num_loaded,
        "moved_home": sum(len(homes) > 1 for homes in homes_of.values()),
    }


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_random_workloads(overlap: bool) -> None:
    totals = {"preempted": 0, "hits": 0, "copied": 0, "evicted": 0}
    for seed in range(250):
        found = run(seed, overlap=overlap)
        totals = {name: count + found[name] for name, count in totals.items()}
    # The workloads must reach the hard parts, or the test proves nothing.
    assert totals["preempted"] > 100, totals
    assert totals["hits"] > 1000, totals
    assert totals["copied"] > 50, totals
    assert totals["evicted"] > 1000, totals


def test_random_workloads_on_stages() -> None:
    """Red when a request that lost its row comes back while an old step of it is under way, or a
    step is planned that needs a token not yet drawn."""
    totals = {"preempted": 0, "moved": 0, "drafted": 0}
    for seed in range(120):
        windows = rotated(seed)
        found = run(seed, overlap=3, has_stages=True, windows=windows, speculates=seed % 3 == 0)
        totals = {name: count + found[name] for name, count in totals.items()}
    assert totals["preempted"] > 50 and totals["moved"] > 100 and totals["drafted"] > 100, totals


def rotated(seed: int) -> tuple[Window, ...]:
    kinds: list[tuple[Window, ...]] = [(None,), (None, 5), (7,)]
    return kinds[seed % len(kinds)]


@pytest.mark.parametrize(("num_homes", "windows"), [(2, (None,)), (3, (None, 5))])
def test_random_workloads_of_several_homes(num_homes: int, windows: tuple[Window, ...]) -> None:
    """Red when a request holds pages of two ranks, or waits for ever for those of a full one."""
    totals: Counter[str] = Counter()
    for seed in range(50):
        kinds = {"is_fair": seed % 4 == 1, "background": seed % 4 == 2, "speculates": seed % 5 == 3}
        where: dict[str, Any] = {"num_homes": num_homes, "windows": windows}
        totals += Counter(run(seed, overlap=0, **where, **kinds))
    assert all(totals[name] for name in ("preempted", "hits", "copied", "evicted", "moved_home"))
    assert totals["accepted"]


def test_random_workloads_of_several_keys() -> None:
    preempted = 0
    for seed in range(80):
        preempted += run(seed, overlap=seed % 2 == 1, is_fair=True)["preempted"]
    assert preempted > 40


def test_without_prefix_cache() -> None:
    for seed in range(60):
        run(seed, overlap=True, caching=False)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_random_workloads_with_groups(windows: tuple[Window, ...], overlap: bool) -> None:
    totals = {"preempted": 0, "hits": 0, "copied": 0, "evicted": 0, "moved": 0, "notes": 0}
    for seed in range(60):
        found = run(seed, overlap=overlap, windows=windows)
        totals = {name: count + found[name] for name, count in totals.items()}
    least = {"preempted": 20, "hits": 300, "copied": 10, "evicted": 300, "moved": 0, "notes": 0}
    if min(window or LONGEST for window in windows) < 40:
        least |= {"moved": 300, "notes": 5}
    assert all(totals[name] >= count for name, count in least.items()), totals


def test_groups_without_prefix_cache() -> None:
    for seed in range(30):
        run(seed, overlap=True, caching=False, windows=(None, 9, 9))


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_with_requests_in_the_background(overlap: bool) -> None:
    for seed in range(60):
        windows = (None, 9) if seed % 2 else (None,)
        is_fair = seed % 3 == 0
        run(seed, overlap=overlap, background=True, windows=windows, is_fair=is_fair)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (6, 13)], ids=str)
def test_random_workloads_with_drafts(windows: tuple[Window, ...], overlap: bool) -> None:
    """Red when a draft changes any output, costs anybody pages, or is published unverified."""
    names = ("preempted", "hits", "copied", "evicted", "drafted", "accepted")
    totals = dict.fromkeys(names, 0)
    for seed in range(60):
        found = run(seed, overlap=overlap, windows=windows, speculates=True)
        totals = {name: count + found[name] for name, count in totals.items()}
    least = {"preempted": 20, "hits": 300, "copied": 10, "evicted": 300}
    least |= {"drafted": 1000 >> overlap, "accepted": 500 >> overlap}
    assert all(totals[name] >= count for name, count in least.items()), totals
    assert totals["accepted"] < totals["drafted"]


@pytest.mark.parametrize("windows", [(None,), (None, 5), (7,), (6, 13), (None, 9, 9, 24)], ids=str)
def test_random_workloads_with_tiers(windows: tuple[Window, ...]) -> None:
    """Red when a page that left the pool comes back as another's, half, or before it was read, or
    when anything is kept for a request that is gone."""
    totals = dict.fromkeys(("preempted", "hits", "evicted", "loaded"), 0)
    for seed in range(40):
        kinds = {"overlap": seed % 2 == 1, "speculates": seed % 4 == 0, "is_fair": seed % 5 == 0}
        found = run(seed, **kinds, windows=windows, has_tiers=True)
        totals = {name: count + found[name] for name, count in totals.items()}
    least = {"preempted": 20, "hits": 300, "evicted": 300, "loaded": 100}
    assert all(totals[name] >= count for name, count in least.items()), totals

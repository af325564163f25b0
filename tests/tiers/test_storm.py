"""Everything at once: a pool for a few, a memory for some, a disk, drafts, aborts and flushes.

Oracle: each request alone in an engine that keeps nothing, float by float. Turns red when a page
that was copied, dropped, written, read or given back in the middle of something else changes a
float, or when any of it is kept for a request that is gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.engine.build import Engine
from quire.kv.check import check
from quire.kv.groups import PageNeeds
from quire.memory.rooms import Rooms
from quire.memory.transfer import PageTransfer
from quire.request import Request
from quire.step import StepPlan, TokenLogprobs
from quire.tiers.tempo import Tempo
from tests.hf import VOCAB
from tests.tiers.test_engine import PARAMS, engine_of, records

SHAPE: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 6}
DRAFTS = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
SPECULATING = ("floats", "int4")
NUM_ROUNDS, NUM_PROMPTS = 5, 8


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)


def prompts() -> list[list[int]]:
    """They share beginnings, and repeat themselves so that drafts are right at times."""
    rng = random.Random(3)
    base = [rng.randrange(3, VOCAB) for _ in range(6)] * 4
    return [base[: 4 * i] + [rng.randrange(3, VOCAB) for _ in range(9)] for i in range(NUM_PROMPTS)]


def request(id: int, which: int) -> Request:
    """From NUM_PROMPTS on they are siblings: the same prompts, other draws."""
    wish = PARAMS.with_(max_tokens=20, temperature=float(which % 2))
    return Request.new(id, prompts()[which % NUM_PROMPTS], wish, seed=which)


def family(id: int, which: int) -> Request:
    """Two answers to one prompt, the second one 50 numbers behind."""
    first = request(id, which)
    first.children = [request(id + 50, which + NUM_PROMPTS)]
    return first


@cache
def alone(case: str) -> list[list[TokenLogprobs]]:
    engine = engine_of(case, enable_prefix_caching=False, max_num_seqs=1, max_model_len=64)
    return [records(engine, [request(which, which)])[which] for which in range(2 * NUM_PROMPTS)]


def small(case: str, folder: Path) -> Engine:
    """A pool for two or three requests, and memory for 16 pages."""
    plain = engine_of(case, **SHAPE)
    kv, page_bytes = plain.core.scheduler.kv, plain.runner.pool.page_bytes
    num_pages = PageNeeds(kv.page_size, kv.windows, 24).of(64) + 12
    return engine_of(
        case,
        kv_cache_memory=num_pages * page_bytes,
        kv_host_memory=16 * page_bytes * len(kv.windows),
        kv_disk=str(folder),
        speculative_config=DRAFTS if case in SPECULATING else None,
        **SHAPE,
    )


def storm(case: str, folder: Path, seed: int = 0) -> Engine:
    rng, engine = random.Random(f"{case} {seed}"), small(case, folder)
    tiers = engine.tiers
    assert tiers is not None
    for round in range(NUM_ROUNDS):
        one_round(engine, case, 100 * round, rng)
        assert tiers.flush(10.0) and tiers._reader.wait(10.0)
        assert tiers.memory._pinned == {} and tiers._bringing == set() and tiers._staged == {}
        assert tiers.memory.num_bytes <= tiers.memory.limit and tiers._backlog == 0
    assert engine.core.scheduler.kv.allocator.num_live == 0
    return engine


def one_round(engine: Engine, case: str, first: int, rng: random.Random) -> None:
    core, want = engine.core, alone(case)
    todo = list(range(first, first + 8))
    asked = {id: rng.randrange(NUM_PROMPTS) for id in todo}
    pairs = {id for id in todo if rng.random() < 0.3}
    asked |= {id + 50: asked[id] + NUM_PROMPTS for id in pairs}
    said: dict[int, list[TokenLogprobs]] = {id: [] for id in asked}
    gone = set[int]()
    while todo or core.has_work:
        for id in todo[: rng.randrange(4)]:
            core.add((family if id in pairs else request)(id, asked[id]))
            todo.remove(id)
        if rng.random() < 0.04:
            id = rng.choice(sorted(asked))
            gone |= {event.request_id for event in core.abort(id)}
        if rng.random() < 0.05:
            core.scheduler.kv.flush()
        for event in core.step():
            said[event.request_id] += event.logprobs
        check(core.scheduler.kv)
    for id, which in asked.items():
        end = len(said[id]) if id in gone else None
        assert said[id] == want[which][:end], f"{case}, request {id}"


@pytest.mark.parametrize("case", ["floats", "full and windowed", "int4", "latents in fp8"])
def test_everything_at_once(case: str, tmp_path: Path) -> None:
    engine = storm(case, tmp_path)
    assert engine.tiers is not None
    counts, stats = engine.tiers.counts, engine.core.scheduler.stats()
    assert counts.loads_disk > 0 and not counts.bad, counts
    assert counts.loads_disk + counts.loads_memory > 20, counts
    assert stats.num_preempted > 0
    assert stats.num_accepted_tokens > 0 or case not in SPECULATING
    engine.tiers.close()


def same_room_twice(patch: pytest.MonkeyPatch) -> None:
    """Memory is given to the next page while it still holds another."""
    plain, kept = Rooms.take, list[memoryview | None]()

    def take(self: Rooms) -> memoryview | None:
        kept.append(plain(self) if len(kept) < 4 else kept[-4])
        return kept[-1]

    patch.setattr(Rooms, "take", take)


def saved_after_the_step(patch: pytest.MonkeyPatch) -> None:
    """A page is copied out when it may be another's already."""

    def around(self: PageTransfer, plan: StepPlan, stage: Any) -> Any:
        staged = stage(plan)
        self.load(plan.loads)
        late, self.late = getattr(self, "late", ()), plan.saves
        self.save(late)
        return staged

    patch.setattr(PageTransfer, "around", around)


@pytest.mark.parametrize("plant", [same_room_twice, saved_after_the_step])
def test_planted_bugs_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="windowed, request"):
        for seed in range(20):
            storm("full and windowed", tmp_path / str(seed), seed)

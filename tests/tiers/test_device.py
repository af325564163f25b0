"""Pages to and from a pool on a device, with lanes that work as late as they may.

Oracles: `PagePool.export` for what a page's bytes are, and an engine without tiers for tokens. Turns
red when a page is overwritten before its copy is out, when a row or a room is used again before what
reads it is over, or when pages of a group end up in another's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.build import Engine
from quire.engine.device_place import DevicePlace
from quire.kv.groups import PageNeeds
from quire.memory.rooms import Rooms
from quire.memory.strip import Strip
from quire.request import Request
from quire.tiers.tempo import Tempo
from tests.lanes import late_lanes
from tests.tiers.test_engine import CASES, PARAMS, VOCAB, alone, engine_of, records, requests

NUM_ROWS, NUM_ROOMS = 6, 400


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)


def place_of(engine: Engine, eagerness: float, seed: int = 0) -> DevicePlace:
    """Few rows and small chunks, so that every way to load is taken."""
    pool, lanes = engine.runner.pool, late_lanes(eagerness, seed)
    node_bytes = len(pool.groups) * pool.page_bytes
    rooms = Rooms(NUM_ROOMS, node_bytes, is_locked=False)
    strip = Strip(NUM_ROWS, node_bytes, lanes.loading, pool.data.device)
    return DevicePlace(lanes, rooms, strip, 3, engine.decisions[0])


def on_device(engine: Engine, eagerness: float = 0.0, seed: int = 0) -> Engine:
    """The same engine, as if its pool were on a device."""
    assert engine.tiers is not None
    place = place_of(engine, eagerness, seed)
    engine.tiers.device = place.beside
    engine.runner.transfer = place.transfer(engine.runner.pool, engine.tiers)
    return engine


@pytest.mark.parametrize("case", CASES)
def test_rows_are_what_is_exported(case: str) -> None:
    pool = engine_of(case).runner.pool
    for region in pool._bytes:
        region.random_(0, 256)
    pages = [5, 2, 7]
    rows = torch.zeros(3, pool.page_bytes, dtype=torch.uint8)
    pool.gather(torch.tensor(pages), rows)
    assert rows.numpy().tobytes() == bytes(pool.export(pages))
    pool.scatter(torch.tensor([1, 4, 6]), rows)
    assert pool.export([1, 4, 6]) == pool.export(pages)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_restarts_remember(case: str, eagerness: float, tmp_path: Path) -> None:
    for round in range(2):
        engine = on_device(engine_of(case, kv_disk=str(tmp_path)), eagerness, round)
        assert records(engine, requests()) == alone(case)
        tiers = engine.tiers
        assert tiers is not None and tiers.flush(5.0)
        assert (tiers.counts.loads_disk > 10) == bool(round) and not tiers.counts.bad
        assert tiers.memory.num_bytes == 0, "kept for nobody"
        assert all_is_free(engine)
        tiers.close()


@pytest.mark.parametrize("case", ["floats", "full and windowed", "int4"])
@pytest.mark.parametrize("eagerness", [0.0, 0.3])
def test_preemption_parks(case: str, eagerness: float) -> None:
    """A pool for few, so that pages are given away while they are being copied out."""
    rng = random.Random(11)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(20)] for _ in range(8)]
    shape: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
    }
    whole = engine_of(case, **shape)
    kv, page_bytes = whole.core.scheduler.kv, whole.runner.pool.page_bytes
    num_pages = PageNeeds(kv.page_size, kv.windows, 16).of(64) + 10
    wish = PARAMS.with_(max_tokens=40)

    def asked() -> list[Request]:
        return [Request.new(i, prompt, wish, seed=i) for i, prompt in enumerate(prompts)]

    args = {"kv_host_memory": 1 << 24, "kv_cache_memory": num_pages * page_bytes, **shape}
    engine = on_device(engine_of(case, **args), eagerness)
    assert records(engine, asked()) == records(whole, asked())
    stats = engine.core.scheduler.stats()
    assert stats.num_preempted > 5 and engine.tiers is not None
    assert engine.tiers.counts.loads_memory > 10 and engine.tiers.counts.drops == 0


def test_what_has_no_room_is_not_kept() -> None:
    engine = on_device(engine_of("floats", kv_host_memory=1 << 24))
    assert engine.tiers is not None and engine.tiers.device is not None
    held = [engine.tiers.device.rooms.take() for _ in range(NUM_ROOMS - 4)]
    assert records(engine, requests()) == alone("floats")
    assert engine.tiers.counts.drops > 10 and len(engine.tiers.memory) == 4
    assert len(held) == NUM_ROOMS - 4


def test_computing_where_loading_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when pages in memory are loaded although the device computes them sooner."""
    engine = on_device(engine_of("floats", kv_host_memory=1 << 24))
    records(engine, requests())
    engine.core.scheduler.kv.flush()
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: False)
    again = requests()
    assert records(engine, again) == alone("floats")
    assert engine.tiers is not None and engine.tiers.counts.loads_memory == 0
    assert engine.tiers.counts.recomputed >= len(again) - 1
    assert engine.tiers.memory._pinned == {} and not engine.tiers._computing


def test_aborts_while_pages_come_leave_nothing() -> None:
    engine, rng = on_device(engine_of("floats", kv_host_memory=1 << 24), 0.3), random.Random(3)
    records(engine, requests())
    for _ in range(10):
        engine.core.scheduler.kv.flush()
        asked = requests()
        for request in asked:
            engine.core.add(request)
        for _ in range(rng.randrange(4)):
            engine.core.step()
        gone = rng.sample(asked, 3)
        for request in gone:
            engine.core.abort(request.id)
        while engine.core.has_work:
            engine.core.step()
        for request in asked:
            said = [one.token for one in alone("floats")[request.id]]
            assert request.output == (said[: request.num_output] if request in gone else said)
    assert all_is_free(engine)


def all_is_free(engine: Engine) -> bool:
    """No row, no pin, no room besides those of the shelf."""
    tiers, transfer = engine.tiers, engine.runner.transfer
    assert tiers is not None and tiers.device is not None
    assert tiers._lifter.wait(5.0) and tiers._reader.wait(5.0)
    for lane in transfer._lanes:
        lane.mark().wait()
    transfer._forget()
    held = len(tiers.memory) if tiers.memory.limit else 0
    rooms, strip = tiers.device.rooms, tiers.device.strip
    assert tiers.memory._pinned == {}
    return rooms.num_free == NUM_ROOMS - held and strip.num_free == NUM_ROWS

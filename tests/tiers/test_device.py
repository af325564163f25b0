"""Pages to and from a pool on a device, with lanes that work as late as they may.

Oracles: `PagePool.export` for what a page's bytes are, and an engine without tiers for tokens.
Turns red when a page is overwritten before its copy is out, when a row or a room is used again
before what reads it is over, or when pages of a group end up in another's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.disagg.ipc_mover import IpcMover
from quire.disagg.sockets import SocketConnector
from quire.engine.build import Engine
from quire.engine.device_place import DevicePlace
from quire.kv.groups import PageNeeds
from quire.kv.tier_index import NOTHING_RAISED, Wanted
from quire.memory.device_transfer import DeviceTransfer
from quire.memory.lanes import Lanes
from quire.memory.pool import PagePool
from quire.memory.rooms import Rooms
from quire.memory.strip import Strip
from quire.request import Request
from quire.step import PageLoad, PageSave, PageWrite, StepPlan
from quire.tiers.beside import Device
from quire.tiers.segment import Sealer
from quire.tiers.tempo import Tempo
from tests.lanes import LateLane, late_lanes
from tests.tiers.nodes import SECRET
from tests.tiers.test_apart import Apart
from tests.tiers.test_engine import CASES, PARAMS, VOCAB, alone, engine_of, records, requests
from tests.tiers.test_ipc import NearStrip

NUM_ROWS, NUM_ROOMS, PAGES = 6, 400, range(1, 25)


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
    engine.runner.transfer.rehearse()
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
def test_restarts_remember(case: str, tmp_path: Path) -> None:
    for round in range(2):
        engine = on_device(engine_of(case, kv_disk=str(tmp_path)), 0.5 * round, round)
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


@pytest.mark.parametrize("transport", ["sockets", "ipc"])
@pytest.mark.parametrize("case", ["floats", "full and windowed", "latents in fp8"])
def test_apart_is_as_together(case: str, transport: str, tmp_path: Path) -> None:
    """Prefill and decode in two engines with pools on a device, the same one or two."""
    apart = Apart(tmp_path, case)
    for engine, process in ((apart.prefill, "a"), (apart.decode, "b")):
        tiers = on_device(engine, 0.3).tiers
        assert tiers is not None and tiers.device is not None
        remote, strip = tiers.remote, tiers.device.strip
        assert isinstance(remote, SocketConnector) and isinstance(strip, Strip)
        if transport == "ipc":
            remote._mover = IpcMover(Sealer(SECRET), tiers.node_bytes, NearStrip(strip), process)
            tiers.raiser = engine.runner.transfer.raised
    assert apart.run(requests()) == alone(case)
    assert apart.decode.tiers is not None
    counts = apart.decode.tiers.counts
    assert counts.loads_remote > 20 and counts.failed_pulls == 0
    assert apart.run(requests("another salt")) == alone(case)
    assert all_is_free(apart.prefill) and all_is_free(apart.decode)
    apart.close()


class Rounds:
    """Random plans over a pool whose steps are late as well; every page has one number all over."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = on_device(engine_of("floats", kv_host_memory=1))
        self.pool = self.engine.runner.pool
        tiers, node_bytes = self.engine.tiers, len(self.pool.groups) * self.pool.page_bytes
        assert tiers is not None and tiers.device is not None
        tiers.memory.limit = 10 * node_bytes
        self.tiers, eagerness = tiers, self.rng.choice([0.0, 0.2, 0.6])
        turn = threading.RLock()
        self.lanes = Lanes(*(LateLane(turn, eagerness, seed + i) for i in range(3)))
        self.strip = Strip(NUM_ROWS, node_bytes, self.lanes.loading, self.pool.data.device)
        rooms = Rooms(14, node_bytes, is_locked=False)
        tiers.device = Device(rooms, self.strip)
        self.transfer = DeviceTransfer(self.pool, tiers, self.lanes, self.strip, 2)
        self.content: dict[int, int] = {}  # page -> its number
        self.count = 0
        self.raised, self.numbers, self.num_raised = NOTHING_RAISED, list[int](), 0

    def fill(self, pages: Sequence[int]) -> None:
        """What a step does to pages that are in its tables."""
        for page in pages:
            self.count = self.count % 250 + 1
            self.content[page] = number = self.count
            self.lanes.compute.do(partial(self.write, page, number))

    def write(self, page: int, number: int) -> None:
        for region in self.pool._bytes:
            region[:, :, page] = number

    def wanted(self, pages: Sequence[int]) -> Wanted:
        """A key that says what its bytes are, and how often it was made."""
        numbers = bytes(self.content[page] for page in pages)
        return Wanted(numbers + self.rng.randbytes(8), b"0000")

    def run(self) -> None:
        num_groups, saved = len(self.pool.groups), list[Wanted]()
        self.fill(PAGES)
        for round in range(60):
            pages = self.rng.sample(PAGES, 4)
            nodes = [tuple(pages[i : i + num_groups]) for i in range(0, 4, num_groups)]
            saves = [PageSave(*self.wanted(node), node) for node in nodes]
            others = self.rng.sample(PAGES, 12)
            given, targets = others[:6], others[6:]
            some = self.rng.sample(saved, min(len(saved), 5))
            known = [one for one in some if self.tiers.memory.pin(round, one)]
            if self.rng.random() < 0.5:
                self.tiers._bringing.add(round)
                self.tiers._lift(round, known)
                self.lanes.loading.mark().wait()
            if self.rng.random() < 0.4:
                self.raise_some()
            pieces = [(one, group) for one in known for group in range(num_groups)][: len(targets)]
            loads = [
                PageLoad(one.key, group, page)
                for (one, group), page in zip(pieces, targets, strict=False)
            ]
            writes = tuple(PageWrite(0, 0, page) for page in given)
            plan = StepPlan(page_writes=writes, saves=tuple(saves), loads=tuple(loads))
            self.transfer.around(plan, lambda plan, given=given: self.fill(given))
            for load in loads:
                self.content[load.page] = load.key[load.group]
            self.tiers.let_go(round)
            saved = [*saved[-8:], *(Wanted(save.key, save.tokens) for save in saves)]

    def raise_some(self) -> None:
        """Copies for another engine, which reads those that were made before."""
        self.check_raised()
        self.raised = NOTHING_RAISED
        pages, num_groups = self.rng.sample(PAGES, 4), len(self.pool.groups)
        nodes = [pages[i : i + num_groups] for i in range(0, 4, num_groups)]
        self.raised = self.transfer.raised(nodes)
        self.numbers = [self.content[page] for page in pages]
        self.num_raised += len(self.raised.rows)

    def check_raised(self) -> None:
        if self.raised.landing is not None:
            self.raised.landing.wait()
        for row, own in zip(self.raised.rows, _batched(self.numbers, self.pool), strict=False):
            for found, number in zip(_pages(self.strip, row.index, self.pool), own, strict=True):
                assert set(found) == {number}

    def check(self) -> None:
        for lane in self.lanes:
            lane.mark().wait()
        for page, number in self.content.items():
            assert set(self.pool.export([page])) == {number}, page
        for key, kept in self.tiers.memory._nodes.items():
            assert kept.data is not None
            size = self.pool.page_bytes
            for group in range(len(self.pool.groups)):
                assert set(kept.data[group * size : (group + 1) * size]) == {key[group]}


def _batched(numbers: Sequence[int], pool: PagePool) -> list[Sequence[int]]:
    size = len(pool.groups)
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def _pages(strip: Strip, index: int, pool: PagePool) -> list[bytes]:
    data, size = strip.rows[index].numpy().tobytes(), pool.page_bytes
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("seed", range(12))
def test_pages_hold_what_was_written_whenever_copies_happen(seed: int) -> None:
    """Red when a save does not wait for the step that wrote its page, or a load for the copy."""
    rounds = Rounds(seed)
    rounds.run()
    rounds.check()
    assert rounds.tiers.counts.loads_memory > 20 and rounds.tiers.counts.saves > 60
    rounds.check_raised()
    assert rounds.num_raised > 3
    rounds.raised = NOTHING_RAISED
    rounds.transfer._forget()
    assert rounds.strip.num_free == NUM_ROWS

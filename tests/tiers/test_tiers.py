"""The tiers as one, without an engine: threads, limits, and what is kept for whom."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from quire.errors import TransferError
from quire.kv.tier_index import Buffer, Wanted
from quire.request import RequestId
from quire.tiers import tempo as tempo_module
from quire.tiers import tiers as tiers_module
from quire.tiers.memory import MemoryShelf
from quire.tiers.tempo import SURE_BYTES, Tempo
from quire.tiers.tiers import Tiers
from tests.tiers.nodes import DATA_BYTES, data_of, node, open_shelf

ONE, TWO = RequestId(1), RequestId(2)
NODES = [node(i) for i in range(8)]


def made(folder: Path, limit: int = 0) -> Tiers:
    return Tiers(MemoryShelf(limit), open_shelf(folder), Tempo(), DATA_BYTES)


def filled(folder: Path, limit: int = 0) -> Tiers:
    tiers = made(folder, limit)
    for number, one in enumerate(NODES):
        tiers.put(one, data_of(number))
    assert tiers.flush(5.0)
    return tiers


def wait(tiers: Tiers, owner: RequestId) -> None:
    assert tiers._reader.wait(5.0) and not tiers.is_bringing(owner)


def test_saved_is_fetched_and_let_go(tmp_path: Path) -> None:
    tiers = filled(tmp_path)
    assert len(tiers.memory) == 0 and tiers.counts.writes == 8, "memory of no size keeps nothing"
    assert tiers.has(NODES[3].key) and not tiers.pin(ONE, NODES[3])
    assert tiers.fetch(ONE, NODES, "")
    wait(tiers, ONE)
    assert all(tiers.pin(ONE, one) for one in NODES)
    assert [tiers.get(one.key).data for one in NODES] == [data_of(i) for i in range(8)]
    assert tiers.counts.loads_disk == 8
    tiers.let_go(ONE)
    assert len(tiers.memory) == 0
    tiers.close()


def test_a_request_that_leaves_while_it_is_read_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a page that is handed over late stays pinned for nobody."""
    tiers = filled(tmp_path)
    reached, go_on = threading.Event(), threading.Event()
    assert tiers.disk is not None
    plain = tiers.disk.read

    def slow(one: Wanted, room: Buffer | None) -> Buffer | None:
        reached.set()
        assert go_on.wait(5.0)
        return plain(one, room)

    monkeypatch.setattr(tiers.disk, "read", slow)
    assert tiers.fetch(ONE, NODES, "")
    assert reached.wait(5.0)
    tiers.let_go(ONE)
    go_on.set()
    wait(tiers, ONE)
    assert len(tiers.memory) == 0 and tiers.memory._pinned == {}
    tiers.close()


def test_memory_drops_the_oldest_that_nobody_needs() -> None:
    memory = MemoryShelf(3 * DATA_BYTES)
    for number, one in enumerate(NODES[:3]):
        memory.put(one, data_of(number), None, "memory")
    assert memory.pin("lease", NODES[0]) and memory.pin("other", NODES[1])
    memory.let_go("other")
    memory.put(NODES[3], data_of(3), None, "memory")
    assert [one.key in memory for one in NODES[:4]] == [True, True, False, True]
    assert not memory.pin("lease", NODES[1]._replace(tokens=b"other"))
    memory.let_go("lease")
    assert memory.num_bytes == 3 * DATA_BYTES


def test_a_slow_disk_costs_what_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the backlog of a slow disk can take all memory, or a step waits for it."""
    monkeypatch.setattr(tiers_module, "MAX_BACKLOG", 3 * DATA_BYTES)
    tiers, go_on = made(tmp_path), threading.Event()
    tiers._writer.do(lambda: assert_set(go_on))
    for number, one in enumerate(NODES):
        tiers.put(one, data_of(number))
    assert tiers.counts.drops == 5 and tiers.memory.num_bytes == 3 * DATA_BYTES
    go_on.set()
    assert tiers.flush(5.0)
    assert tiers.counts.writes == 3 and tiers.memory.num_bytes == 0
    tiers.close()


def assert_set(event: threading.Event) -> None:
    assert event.wait(5.0)


def test_loading_or_computing_by_what_was_measured(tmp_path: Path) -> None:
    tempo = Tempo()
    assert tempo.is_worth(16, 10**9), "nothing is known yet"
    tempo.read(10**6, 0.01)  # 100 MB/s
    tempo.stepped(4, 1e9)  # too few to say anything
    tempo.stepped(1000, 1.0)
    assert not tempo.is_worth(5, 10**6), "as much was read before"
    assert tempo.is_worth(5, 2 * 10**6), "so little was read that it says nothing of more"
    for _ in range(20):
        tempo.read(SURE_BYTES // 16, SURE_BYTES / 16e8)
    assert tempo.is_worth(1000, 90 * 10**6) and not tempo.is_worth(1000, 110 * 10**6)
    tiers = filled(tmp_path)
    tiers.tempo.read(len(NODES) * DATA_BYTES, 1e3)
    tiers.tempo.stepped(1000, 0.001)
    assert not tiers.fetch(ONE, NODES, "") and tiers.counts.recomputed == 1
    tiers.close()


def test_a_disk_that_turns_out_to_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the rest of a prefix is read although it is computed sooner by now."""
    for module in (tiers_module, tempo_module):
        monkeypatch.setattr(module, "SURE_BYTES", 2 * DATA_BYTES)
    tiers = filled(tmp_path)
    assert tiers.disk is not None
    read = tiers.disk.read

    def slowly(node: Wanted, room: Buffer | None = None) -> Buffer | None:
        time.sleep(0.02)
        return read(node, room)

    tiers.disk.read = slowly  # type: ignore[method-assign]
    tiers.tempo.stepped(1000, 0.001)
    assert tiers.fetch(ONE, NODES, "") and tiers._reader.wait(5.0)
    assert len(tiers.memory.pinned(ONE, NODES)) == 2 and tiers.counts.recomputed == 1
    tiers.let_go(ONE)
    tiers.close()


def test_a_pull_that_fails_is_no_wait(tmp_path: Path) -> None:
    class Broken:
        def offer(self, nodes: object, raised: object = None) -> str:
            return ""

        def pull(self, ticket: str, wanted: object, is_alive: object) -> list[bytearray]:
            raise TransferError("gone")

        def close(self) -> None: ...

    tiers = made(tmp_path)
    tiers.remote = Broken()
    assert tiers.fetch(TWO, NODES, "some ticket")
    assert tiers._puller.wait(5.0) and not tiers.is_bringing(TWO)
    assert tiers.counts.failed_pulls == 1 and tiers.memory._pinned == {}
    tiers.close()


def test_leases_do_not_outgrow_memory() -> None:
    """Red when prompts that nobody fetches can pin more than memory may hold."""

    class Lender:
        def __init__(self) -> None:
            self.num_offers = 0

        def offer(self, nodes: object, raised: object) -> str:
            self.num_offers += 1
            return "a ticket"

        def pull(self, ticket: str, wanted: object, is_alive: object) -> list[bytearray]:
            return []

        def close(self) -> None: ...

    tiers, lender = Tiers(MemoryShelf(3 * DATA_BYTES), None, Tempo(), DATA_BYTES), Lender()
    tiers.remote = lender
    for number, one in enumerate(NODES[:4]):
        assert tiers.offer(NODES[:1]) == "a ticket"
        tiers.memory.put(one, data_of(number), RequestId(number), "memory")
    assert tiers.memory.num_bytes == 4 * DATA_BYTES
    assert tiers.offer(NODES[:1]) == "" and lender.num_offers == 4
    tiers.let_go(RequestId(0))
    assert tiers.offer(NODES[1:2]) == "a ticket"
    tiers.close()

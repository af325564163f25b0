"""Faults of tiers that nobody may wait for for ever: no descriptors, no memory, a disk that fills.

Turns red when a thread of the tiers dies of an error and those that wait for it wait on, when a
page stays pinned for nobody, or when a file that could not be begun spoils what follows.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quire.disagg.leases import Leases
from quire.kv.tier_index import Buffer
from quire.tiers import disk as disk_module
from quire.tiers.memory import MemoryShelf
from quire.tiers.porter import Porter
from tests.tiers.nodes import DATA_BYTES, count_right, data_of, node, open_shelf
from tests.tiers.test_tiers import NODES, ONE, TWO, filled, wait

Patch = pytest.MonkeyPatch


def fail(code: int) -> Callable[..., None]:
    def failing(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return failing


def no_memory(*args: object, **kwargs: object) -> None:
    raise MemoryError("planted")


def test_no_descriptor_to_read_with_is_a_miss(tmp_path: Path) -> None:
    """A node that cannot be read now is computed, and is not forgotten."""
    tiers = filled(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module.os, "dup", fail(errno.EMFILE))
        assert tiers.fetch(ONE, NODES, "")
        wait(tiers, ONE)
        assert not tiers.pin(ONE, NODES[0])
    tiers.let_go(ONE)
    assert tiers.fetch(TWO, NODES, "")
    wait(tiers, TWO)
    assert all(tiers.pin(TWO, one) for one in NODES) and tiers.counts.bad == 0
    tiers.let_go(TWO)
    tiers.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_lets_go_of_whoever_waits(tmp_path: Path, monkeypatch: Patch) -> None:
    """Red when an error nobody thought of leaves requests waiting beside the line."""
    tiers = filled(tmp_path)
    assert tiers.disk is not None
    with monkeypatch.context() as patch:
        patch.setattr(tiers.disk, "read", no_memory)
        assert tiers.fetch(ONE, NODES, "")
        wait(tiers, ONE)
    tiers.let_go(ONE)
    with monkeypatch.context() as patch:
        patch.setattr(tiers.disk, "write_many", no_memory)
        tiers.put(node(100), data_of(100))
        assert tiers.flush(5.0)
    assert tiers.memory._pinned == {} and tiers._backlog == 0
    tiers.put(node(101), data_of(101))
    assert tiers.flush(5.0) and tiers.has(node(101).key)
    assert tiers.fetch(TWO, NODES, "")
    wait(tiers, TWO)
    assert all(tiers.pin(TWO, one) for one in NODES)
    tiers.let_go(TWO)
    tiers.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_porter_goes_on_after_a_task_that_fails() -> None:
    porter, done = Porter("test"), list[int]()
    porter.do(no_memory)
    porter.do(lambda: done.append(1))
    assert porter.wait(5.0) and done == [1]
    porter.close(5.0)


def test_a_file_that_could_not_be_begun_is_no_segment(tmp_path: Path, monkeypatch: Patch) -> None:
    """Red when a disk that fills up at a segment's first bytes loses all that is written later."""
    shelf = open_shelf(tmp_path)
    plain = os.write

    def half(fd: int, data: Sequence[int] | bytes | Buffer) -> int:
        plain(fd, bytes(data)[:20])
        raise OSError(errno.ENOSPC, "planted")

    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "write", half)
        assert not shelf.write(node(0), data_of(0)) and shelf.is_paused
    shelf._resume = 0.0
    for number in range(4):
        assert shelf.write(node(number), data_of(number))
    assert count_right(shelf, range(4)) == 4 and shelf.num_bad == 0
    used = sum(path.stat().st_size for path in tmp_path.glob("*.pages"))
    assert shelf.num_bytes == used
    shelf.close()
    again = open_shelf(tmp_path)
    assert count_right(again, range(4)) == 4 and again.num_foreign == 0
    again.close()


def test_a_segment_that_cannot_be_opened_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    shelf = open_shelf(tmp_path)
    plain = os.open

    def only_for_writing(path: Path, flags: int, *more: int) -> int:
        if flags == os.O_RDONLY:
            raise OSError(errno.EMFILE, "planted")
        return plain(path, flags, *more)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(disk_module.os, "open", only_for_writing)
        assert not shelf.write(node(0), data_of(0))
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.glob("*.pages")) == []
    shelf.close()


def test_a_closed_shelf_is_not_written(tmp_path: Path) -> None:
    """Red when a writer that was slow to end writes to a folder that is another engine's by now."""
    shelf = open_shelf(tmp_path)
    shelf.close()
    other = open_shelf(tmp_path)
    assert not shelf.write(node(0), data_of(0))
    assert list(tmp_path.glob("*.pages")) == []
    other.close()


def test_a_clock_that_jumps_back_does_not_freeze_what_was_used(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Red when a segment's last use stays in the future: it would never be the least used."""
    shelf = open_shelf(tmp_path)
    assert shelf.write(node(0), data_of(0))
    (_path,) = tmp_path.glob("*.pages")
    now = disk_module.time.time()
    monkeypatch.setattr(disk_module.time, "time", lambda: now + 86_400)
    assert shelf.read(node(0)) is not None
    monkeypatch.setattr(disk_module.time, "time", lambda: now)
    assert shelf.read(node(0)) is not None
    (segment,) = shelf._segments.values()
    assert segment.used == now
    shelf.close()


def test_permissions_that_changed_cost_nothing_else(tmp_path: Path, monkeypatch: Patch) -> None:
    """A segment that may not be removed, one that may not be read any more after a restart."""
    shelf = open_shelf(tmp_path, 1 << 20)
    for number in range(300):
        assert shelf.write(node(number), data_of(number))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail(errno.EACCES))
        big = bytearray(200_000)
        assert not shelf.write(node(1000), big) and shelf.is_paused
        assert count_right(shelf, range(300)) == 300
    shelf.close()
    with monkeypatch.context() as patch:
        patch.setattr(disk_module, "preamble_of", fail(errno.EACCES))
        again = open_shelf(tmp_path, 1 << 20)
    assert len(again) == 0 and again.num_foreign == 1
    assert again.write(node(0), data_of(0)), "a name that is taken already"
    assert sum(path.stat().st_size for path in tmp_path.glob("*.pages")) == again.num_bytes
    again.close()


def test_a_lease_on_nothing_pins_nothing() -> None:
    """A node that is on the device alone cannot be lent, and is not kept for a lease."""
    memory = MemoryShelf(0)
    memory.put(NODES[0], None, "request", "remote")
    leases = Leases(memory)
    assert leases.grant(NODES) is None
    memory.let_go("request")
    assert len(memory) == 0 and memory._pinned == {}


def test_the_limit_of_the_folder_holds_in_batches(tmp_path: Path) -> None:
    """Red when many records that are written at once outgrow the folder or one segment."""
    limit = 1 << 20
    shelf = open_shelf(tmp_path, limit)
    for first in range(0, 2000, 500):
        numbers = range(first, first + 500)
        assert shelf.write_many([(node(i), data_of(i)) for i in numbers]) == 500
        sizes = [path.stat().st_size for path in tmp_path.glob("*.pages")]
        assert sum(sizes) == shelf.num_bytes <= limit
    assert count_right(shelf, range(1900, 2000)) == 100
    too_large = (node(5000), bytearray(limit))
    mixed = [(node(3000), data_of(3000)), too_large, (node(3001), data_of(3001))]
    assert shelf.write_many(mixed) == 2 and count_right(shelf, range(3000, 3002)) == 2
    shelf.close()
    assert limit < DATA_BYTES * 500, "a batch must be larger than the folder"

"""Memory that is left and taken again, against a driver that is played with memory of the host."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from quire.memory.vault import SHORT, bound
from quire.native.build import ensure_device_built, find_compiler

if sys.platform != "linux" or find_compiler() is None:
    pytest.skip("needs Linux and a C compiler", allow_module_level=True)

GRAIN = 65536  # of fake_driver.c
WEIGHTS, PAGES, OTHER = 101, 102, 103


class Case:
    """The library, and the driver it talks to. Both live as long as the process."""

    def __init__(self, folder: Path) -> None:
        driver, source = folder / "libfake.so", Path(__file__).with_name("fake_driver.c")
        compiler = find_compiler()
        assert compiler is not None
        words = (*compiler, "-shared", "-fPIC", "-O1", "-o", str(driver), str(source))
        subprocess.run(words, check=True)
        path = str(ensure_device_built())
        self.c, self.driver = bound(path), ctypes.CDLL(str(driver))
        alloc, free = self.c.qv_alloc, self.c.qv_free
        alloc.restype, alloc.argtypes = (
            ctypes.c_void_p,
            (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p),
        )
        free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        assert self.c.qv_open(str(driver).encode()) is None

    @property
    def used(self) -> int:
        return ctypes.c_size_t.in_dll(self.driver, "fake_used").value

    def limit(self, num_bytes: int) -> None:
        ctypes.c_size_t.in_dll(self.driver, "fake_limit").value = num_bytes

    def alloc(self, tag: int, size: int) -> int | None:
        self.c.qv_tag(tag)
        found: int | None = self.c.qv_alloc(size, 0, None)
        self.c.qv_tag(-1)
        return found

    def free(self, *blocks: int) -> None:
        for at in blocks:
            self.c.qv_free(at, 0, 0, None)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("driver"))


def write(at: int, text: bytes) -> None:
    ctypes.memmove(at, text, len(text))


def is_mapped(at: int) -> bool:
    """Whether the address can be read; one that is not mapped has no rights."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= at < end:
            return rights.startswith("rw")
    return False


def test_weights_come_back_where_they_were_and_pages_empty(case: Case) -> None:
    """Red when an address changes, a byte is lost, pages keep theirs, or memory is not returned."""
    before = case.used
    blocks = [case.alloc(WEIGHTS, size) for size in (100, 3 * GRAIN, GRAIN + 1)]
    page, other = case.alloc(PAGES, 5 * GRAIN), case.alloc(OTHER, GRAIN)
    weights = [block for block in blocks if block is not None]
    assert len(weights) == 3 and page is not None and other is not None
    assert case.c.qv_bytes(WEIGHTS) == 6 * GRAIN and case.c.qv_bytes(PAGES) == 5 * GRAIN
    for at in (*weights, page, other):
        write(at, b"at %x" % at)
    for _ in range(2):
        copy = mmap.mmap(-1, 6 * GRAIN)
        host = ctypes.addressof(ctypes.c_char.from_buffer(copy))
        assert case.c.qv_save(WEIGHTS, host) == 0
        assert case.c.qv_drop(WEIGHTS) == 0 and case.c.qv_drop(PAGES) == 0
        assert case.used - before == GRAIN
        assert not any(is_mapped(at) for at in (*weights, page)) and is_mapped(other)
        assert case.c.qv_map(WEIGHTS) == 0 and case.c.qv_map(PAGES) == 0
        assert case.c.qv_fill(WEIGHTS, host) == 0 and case.c.qv_fill(PAGES, None) == 0
        for at in (*weights, other):
            assert ctypes.string_at(at, 20).startswith(b"at %x" % at)
        assert ctypes.string_at(page, 20) == bytes(20)
        write(page, b"dirty")
    case.free(*weights, page, other)
    assert case.used == before and case.c.qv_bytes(WEIGHTS) == 0


def test_all_or_nothing_is_taken(case: Case) -> None:
    """Red when a return that runs out of memory half way keeps what it has."""
    before = case.used
    blocks = [case.alloc(WEIGHTS, GRAIN) for _ in range(4)]
    weights = [block for block in blocks if block is not None]
    assert case.c.qv_drop(WEIGHTS) == 0
    case.limit(before + 2 * GRAIN)
    assert case.c.qv_map(WEIGHTS) == SHORT
    assert case.used == before and not any(map(is_mapped, weights))
    assert case.alloc(WEIGHTS, 3 * GRAIN) is None  # torch is told so
    case.limit(before + 4 * GRAIN)
    assert case.c.qv_map(WEIGHTS) == 0 and all(map(is_mapped, weights))
    case.limit((1 << 64) - 1)
    case.free(*weights)
    assert case.used == before


def test_what_is_freed_while_it_is_away_stays_away(case: Case) -> None:
    """Red when an engine that ends while parked takes memory or frees it twice."""
    before = case.used
    kept, gone = case.alloc(WEIGHTS, GRAIN), case.alloc(WEIGHTS, GRAIN)
    assert kept is not None and gone is not None
    assert case.c.qv_drop(WEIGHTS) == 0
    case.free(gone)
    assert case.c.qv_map(WEIGHTS) == 0 and case.used - before == GRAIN
    case.free(kept)
    assert case.used == before


def test_nothing_is_given_to_whoever_set_no_tag(case: Case) -> None:
    assert case.c.qv_alloc(GRAIN, 0, None) is None


def test_a_driver_that_lacks_a_call_is_named(case: Case) -> None:
    assert case.c.qv_open(b"libnothing.so.9") == b"libnothing.so.9"

"""Segments on disk: what was written is what is read, or it is not there. Never anything else."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.errors import NotSupported
from quire.kv.tier_index import Buffer
from quire.tiers.disk import SUFFIX, DiskShelf
from quire.tiers.secret_file import read_secret
from tests.rules.source import ROOT
from tests.tiers.nodes import SECRET, count_right, data_of, node, open_shelf

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
NUM_KILLS = 100 if IS_LONG else 6
NUM_FLIPS = 3000 if IS_LONG else 300


def filled(folder: Path, count: int, **options: object) -> None:
    shelf = open_shelf(folder, **options)
    for number in range(count):
        assert shelf.write(node(number), data_of(number))
    shelf.close()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_what_was_written_is_found_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path, 50)
    shelf = open_shelf(tmp_path)
    assert len(shelf) == 50 and count_right(shelf, range(60)) == 50
    other_tokens = node(3)._replace(tokens=node(4).tokens)
    assert shelf.read(other_tokens) is None, "one key, other tokens"
    shelf.close()


def test_flipped_bytes_are_misses(tmp_path: Path) -> None:
    """Red when any byte of a segment can change and its pages are taken all the same."""
    filled(tmp_path, 8)
    (path,) = segments(tmp_path)
    whole, rng = path.read_bytes(), random.Random(1)
    lost = 0
    for _ in range(NUM_FLIPS):
        at = rng.randrange(len(whole))
        broken = bytearray(whole)
        broken[at] ^= rng.randrange(1, 256)
        path.write_bytes(broken)
        shelf = open_shelf(tmp_path)
        found = count_right(shelf, range(8))
        shelf.close()
        lost += 8 - found
        assert found < 8, f"byte {at} changed and nobody noticed"
    assert lost < 5 * NUM_FLIPS, "a flipped byte costs far more than its record"


@pytest.mark.parametrize("kept", [0, 1, 40, 63, 64, 100, 179, 180, 200, 3000, 9000])
def test_files_cut_short_keep_what_is_whole(tmp_path: Path, kept: int) -> None:
    filled(tmp_path, 8)
    (path,) = segments(tmp_path)
    os.truncate(path, kept)
    shelf = open_shelf(tmp_path)
    assert count_right(shelf, range(8)) == max(0, kept - 64) // (116 + 16 + 3000)
    assert shelf.write(node(100), data_of(100)), "the folder can be used on"
    assert count_right(shelf, range(100, 101)) == 1
    shelf.close()


def test_garbage_is_no_segment(tmp_path: Path) -> None:
    filled(tmp_path, 4)
    (tmp_path / f"ffffffffffffffff{SUFFIX}").write_bytes(random.Random(2).randbytes(5000))
    (tmp_path / f"nonsense{SUFFIX}").write_bytes(b"")
    shelf = open_shelf(tmp_path)
    assert count_right(shelf, range(4)) == 4 and shelf.num_foreign == 2
    shelf.close()


def test_another_model_and_another_secret_find_nothing(tmp_path: Path) -> None:
    """Red when pages of other weights, forms or kernels could be taken for ours."""
    filled(tmp_path, 4)
    for other in (open_shelf(tmp_path, mark=b"o" * 32),):
        assert len(other) == 0 and other.num_foreign == 1
        other.close()
    forged = open_shelf(tmp_path, secret=b"o" * 32)
    assert len(forged) == 0
    forged.close()


def test_two_engines_cannot_have_one_folder(tmp_path: Path) -> None:
    first = open_shelf(tmp_path)
    with pytest.raises(NotSupported, match=f"in use by process {os.getpid()}.*folder of its own"):
        open_shelf(tmp_path)
    first.close()
    open_shelf(tmp_path).close()


def test_the_limit_holds_and_what_was_used_stays(tmp_path: Path) -> None:
    """Red when the folder outgrows its limit, or the least recently used is not what goes."""
    limit = 4 << 20
    shelf = open_shelf(tmp_path, limit)
    big = bytearray(100_000)
    for number in range(200):
        assert shelf.write(node(number), big)
        assert shelf.read(node(0)) is not None, "used all the time, and removed"
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    assert shelf.num_removed > 5 and shelf.read(node(30)) is None
    assert shelf.read(node(199)) is not None
    assert not shelf.write(node(999), bytearray(limit)), "larger than the folder may be"
    shelf.close()


def test_foreign_segments_make_way_first(tmp_path: Path) -> None:
    filled(tmp_path, 300, mark=b"o" * 32)
    shelf = open_shelf(tmp_path, 1 << 20)
    for number in range(100):
        assert shelf.write(node(number), data_of(number))
    assert count_right(shelf, range(100)) == 100
    shelf.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_still_read(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when part of a record stays behind: what follows would be lost after a restart."""
    filled(tmp_path, 3)
    shelf = open_shelf(tmp_path)
    assert shelf.write(node(3), data_of(3))

    def write(fd: int, parts: Sequence[bytes | Buffer]) -> None:
        os.write(fd, b"".join(parts)[:500])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shelf.scribe, "write", write)
    assert not shelf.write(node(4), data_of(4)) and shelf.is_paused
    monkeypatch.undo()
    assert not shelf.write(node(5), data_of(5)), "not tried again at once"
    assert count_right(shelf, range(6)) == 4
    shelf._resume = 0.0
    assert shelf.write(node(5), data_of(5))
    shelf.close()
    again = open_shelf(tmp_path)
    assert count_right(again, range(6)) == 5
    again.close()


def test_a_folder_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file"):
        open_shelf(tmp_path / "file")


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    """Red when a record that a dying process left half written is taken for a page."""
    rng, first, total = random.Random(3), 0, 0
    for _ in range(NUM_KILLS):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.tiers.writing_child", str(tmp_path), str(first)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.02)
        child.kill()
        said = len(child.stdout.read().splitlines()) + 1
        child.wait()
        shelf = open_shelf(tmp_path, limit=1 << 24)
        found = count_right(shelf, range(first, first + said + 50))
        assert said <= found + 1 or shelf.num_removed, "what was said to be written is gone"
        total, first = total + found, first + 100_000
        shelf.close()
    assert total > NUM_KILLS


def test_secret_is_for_its_owner_alone(tmp_path: Path) -> None:
    made = read_secret(tmp_path / "secret")
    assert read_secret(tmp_path / "secret") == made != SECRET
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    os.chmod(tmp_path / "secret", 0o640)
    with pytest.raises(NotSupported, match="chmod 600"):
        read_secret(tmp_path / "secret")
    (tmp_path / "short").write_bytes(b"x")
    os.chmod(tmp_path / "short", 0o600)
    with pytest.raises(NotSupported, match="holds 1 bytes"):
        read_secret(tmp_path / "short")


def test_reads_and_writes_from_two_threads(tmp_path: Path) -> None:
    """Red when a segment that is removed is read through a descriptor of another file."""
    import threading

    shelf = open_shelf(tmp_path, 1 << 20)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(40):
                count_right(shelf, range(0, 1200, 37))
        except BaseException as error:
            failures.append(error)
            raise

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1200):
        shelf.write(node(number), data_of(number))
    reader.join()
    assert not failures and shelf.num_bad == 0 and isinstance(shelf, DiskShelf)
    shelf.close()

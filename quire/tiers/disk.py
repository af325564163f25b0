"""DiskShelf: nodes of the prefix tree in a folder of segments, the least used removed first.

One process at a time has the folder. It writes to segments of its own and reads those of its
forerunners with the same fingerprint; others are only counted, and make way first when the folder
is full. Whatever goes wrong with a file costs what the file holds and nothing else: a record that
cannot be read is forgotten, a folder that cannot be written is only read. `segment.py` has the
format. All methods but `__contains__` are for background threads.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import NotSupported
from quire.kv.tier_index import Buffer, Wanted
from quire.obs.log import log_event
from quire.tiers.segment import Sealer, Spot, preamble_of, scan

SUFFIX = ".pages"
MIN_SEGMENT, MAX_SEGMENT = 1 << 20, 256 << 20  # bytes
SEGMENTS = 16  # that the limit shall hold at least
PAUSE_S = 30.0  # without writing after an error
TOUCH_S = 10.0  # how exact the time of a segment's last use is


@dataclass(slots=True, eq=False)
class Segment:
    path: Path
    num_bytes: int
    used: float
    fd: int = -1  # open for reading; -1: of another model, never read
    keys: list[bytes] = field(default_factory=list)


class DiskShelf:
    def __init__(
        self,
        folder: Path,
        limit: int,
        fingerprint: bytes,
        sealer: Sealer,
        patience_s: float = 0.0,
    ) -> None:
        """Raises NotSupported or OSError when the folder cannot be had. `patience_s`: how long to
        wait for a process that has it still."""
        self.folder, self.limit = folder, limit
        self._sealer, self._preamble = sealer, sealer.preamble(fingerprint)
        self._segment_bytes = min(max(limit // SEGMENTS, MIN_SEGMENT), MAX_SEGMENT)
        self._lock = threading.Lock()
        self._index: dict[bytes, tuple[Segment, Spot]] = {}
        self._segments: OrderedDict[Path, Segment] = OrderedDict()  # least recently used first
        self._open: Segment | None = None  # the one that is written
        self._write_fd = -1
        self._number = 0
        self._resume = 0.0  # when writing may be tried again
        self.num_bytes = self.num_bad = self.num_removed = self.num_foreign = 0
        self._claim = _claim(folder, patience_s)
        self._scan()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_paused(self) -> bool:
        """Whether writing has failed a short while ago."""
        return time.monotonic() < self._resume

    def close(self) -> None:
        with self._lock:
            self._end_segment()
            for segment in self._segments.values():
                _close(segment)
            self._segments.clear()
            self._index.clear()
            os.close(self._claim)

    # ------------------------------------------------------------ reading

    def _scan(self) -> None:
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                facts = path.stat()
                is_ours = preamble_of(path) == self._preamble
                fd = os.open(path, os.O_RDONLY) if is_ours else -1
            except OSError as error:
                log_event("kv_segment_unreadable", severity=logging.WARNING, reason=str(error))
                continue
            found.append(Segment(path, facts.st_size, facts.st_mtime if is_ours else 0.0, fd))
        for segment in sorted(found, key=lambda one: one.used):
            self._segments[segment.path] = segment
            self.num_bytes += segment.num_bytes
            self.num_foreign += segment.fd < 0
            for key, spot in scan(segment.fd) if segment.fd >= 0 else ():
                segment.keys.append(key)
                self._index[key] = (segment, spot)
        numbers = [int(path.stem, 16) for path in self._segments if _is_number(path.stem)]
        self._number = max(numbers, default=0)

    def read(self, node: Wanted, room: Buffer | None = None) -> Buffer | None:
        """Pages of a node, in `room` if they fit; None: it is not here, or not what was written,
        and is forgotten. Several threads may read at once."""
        with self._lock:
            segment, spot = self._index.get(node.key, (None, None))
            if segment is None or spot is None:
                return None
            fd = os.dup(segment.fd)  # the segment may be removed meanwhile
        try:
            data = self._sealer.read(fd, node.key, spot, node.tokens, room)
        except OSError as error:
            log_event("kv_segment_unreadable", severity=logging.WARNING, reason=str(error))
            data = None
        finally:
            os.close(fd)
        with self._lock:
            if data is not None:
                self._touch(segment)
            elif self._index.get(node.key, (None,))[0] is segment:
                self.num_bad += 1
                del self._index[node.key]
        return data

    def _touch(self, segment: Segment) -> None:
        now = time.time()
        if segment.path in self._segments:
            self._segments.move_to_end(segment.path)
        if now - segment.used > TOUCH_S:
            segment.used = now
            with suppress(OSError):  # only the order after a restart suffers
                os.utime(segment.path)

    # ------------------------------------------------------------ writing

    def write(self, node: Wanted, data: Buffer) -> bool:
        """Append a node; False: it could not be written, and nothing of it is left."""
        if self.is_paused:
            return False
        with self._lock:
            try:
                return self._append(node, data)
            except OSError as error:
                self._pause(error)
                return False

    def _append(self, node: Wanted, data: Buffer) -> bool:
        head = self._sealer.record_head(node.key, node.tokens, data)
        length = len(head) + len(node.tokens) + len(data)
        if not self._make_room(length + len(self._preamble)):
            return False
        if self._open is None or self._open.num_bytes + length > self._segment_bytes:
            self._end_segment()
            self._begin_segment()
        segment = self._open
        assert segment is not None
        begin = segment.num_bytes
        try:
            for part in (head, node.tokens, data):
                _write_all(self._write_fd, part)
        except OSError:
            self._cut(segment, begin)
            raise
        segment.num_bytes += length
        self.num_bytes += length
        segment.keys.append(node.key)
        spot = Spot(begin + len(head), len(node.tokens), len(data), head[-36:-4])
        self._index[node.key] = (segment, spot)
        return True

    def _cut(self, segment: Segment, length: int) -> None:
        """Take back a part of a record; what follows one would not be found after a restart."""
        with suppress(OSError):
            os.ftruncate(self._write_fd, length)
        self._end_segment()

    def _begin_segment(self) -> None:
        self._number += 1
        path = self.folder / f"{self._number:016x}{SUFFIX}"
        self._write_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._open = Segment(path, 0, time.time(), os.open(path, os.O_RDONLY))
        self._segments[path] = self._open
        _write_all(self._write_fd, self._preamble)
        self._open.num_bytes = len(self._preamble)
        self.num_bytes += len(self._preamble)

    def _end_segment(self) -> None:
        if self._open is not None:
            os.close(self._write_fd)
            self._open, self._write_fd = None, -1

    def _make_room(self, length: int) -> bool:
        """Remove the least recently used segments until so many bytes fit."""
        if length > self.limit:
            return False
        while self.num_bytes + length > self.limit:
            oldest = next(iter(self._segments.values()))
            if oldest is self._open:
                self._end_segment()
            self._remove(oldest)
        return True

    def _remove(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        del self._segments[segment.path]
        _close(segment)
        self.num_bytes -= segment.num_bytes
        self.num_removed += 1
        for key in segment.keys:
            if self._index.get(key, (None,))[0] is segment:
                del self._index[key]

    def _pause(self, error: OSError) -> None:
        """Full, read-only or broken: read on, and try to write again later."""
        self._resume = time.monotonic() + PAUSE_S
        way_out = "make room or lower --kv-disk-size" if error.errno == errno.ENOSPC else ""
        log_event(
            "kv_disk_not_written",
            severity=logging.WARNING,
            folder=str(self.folder),
            reason=str(error),
            way_out=way_out or "pages there are still read; writing is tried again",
            again_in_s=PAUSE_S,
        )


def _claim(folder: Path, patience_s: float) -> int:
    """The folder is ours until this file is closed, however the process ends."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + patience_s
    while not (is_ours := _locks(fd)) and time.monotonic() < until:
        time.sleep(0.05)
    if not is_ours:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
        os.close(fd)
        raise NotSupported(
            f"{folder} is in use by process {owner}: one engine at a time can have it; give each a"
            " folder of its own"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _write_all(fd: int, data: bytes | Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _close(segment: Segment) -> None:
    if segment.fd >= 0:
        os.close(segment.fd)
        segment.fd = -1


def _is_number(text: str) -> bool:
    return len(text) == 16 and all(letter in "0123456789abcdef" for letter in text)

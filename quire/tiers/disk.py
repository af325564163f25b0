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
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import NotSupported
from quire.kv.tier_index import Buffer, Wanted
from quire.obs.log import log_event
from quire.tiers.scribe import PlainScribe, Scribe
from quire.tiers.segment import Page, Record, Sealer, Spot, preamble_of, scan

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
    fd: int = -1  # open for reading; -1: of another model, or unreadable
    keys: list[bytes] = field(default_factory=list)


class DiskShelf:
    def __init__(
        self,
        folder: Path,
        limit: int,
        fingerprint: bytes,
        sealer: Sealer,
        scribe: Scribe | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """`scribe` seals and writes. `patience_s`: how long to wait for a process that has the
        folder still. Raises NotSupported or OSError: it cannot be had."""
        self.folder, self.limit = folder, limit
        self._sealer, self._preamble = sealer, sealer.preamble(fingerprint)
        self.scribe = scribe or PlainScribe()
        self._segment_bytes = min(max(limit // SEGMENTS, MIN_SEGMENT), MAX_SEGMENT)
        self._writing = threading.Lock()  # held while a file grows; taken before the other
        self._lock = threading.Lock()
        self._index: dict[bytes, tuple[Segment, Spot]] = {}
        self._segments: OrderedDict[Path, Segment] = OrderedDict()  # least recently used first
        self._open: Segment | None = None  # the one that is written
        self._write_fd = -1
        self._number = 0
        self._is_closed = False
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
        with self._writing, self._lock:
            self._is_closed = True
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
            with suppress(FileNotFoundError):  # somebody makes room by hand
                facts, fd = path.stat(), self._open_ours(path)
                found.append(Segment(path, facts.st_size, facts.st_mtime if fd >= 0 else 0.0, fd))
        for segment in sorted(found, key=lambda one: one.used):
            self._segments[segment.path] = segment
            self.num_bytes += segment.num_bytes
            self.num_foreign += segment.fd < 0
            for key, spot in scan(segment.fd) if segment.fd >= 0 else ():
                segment.keys.append(key)
                self._index[key] = (segment, spot)
        numbers = [int(path.stem, 16) for path in self._segments if _is_number(path.stem)]
        self._number = max(numbers, default=0)

    def _open_ours(self, path: Path) -> int:
        """-1: it is another model's, or may not be read. It takes room all the same."""
        try:
            return os.open(path, os.O_RDONLY) if preamble_of(path) == self._preamble else -1
        except OSError as error:
            log_event("kv_segment_unreadable", severity=logging.WARNING, reason=str(error))
            return -1

    def read(self, node: Wanted, room: Buffer | None = None) -> Buffer | None:
        """Pages of a node, in `room` if they fit; None: it is not here, or not what was written,
        and is forgotten. Several threads may read at once."""
        with self._lock:
            segment, spot = self._index.get(node.key, (None, None))
            if segment is None or spot is None:
                return None
            try:
                fd = os.dup(segment.fd)  # the segment may be removed meanwhile
            except OSError as error:  # no descriptor left: not the node's fault
                log_event("kv_segment_not_read", severity=logging.WARNING, reason=str(error))
                return None
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
        if abs(now - segment.used) > TOUCH_S:  # the clock may have been set back
            segment.used = now
            with suppress(OSError):  # only the order after a restart suffers
                os.utime(segment.path)

    # ------------------------------------------------------------ writing

    def write(self, node: Wanted, data: Buffer) -> bool:
        """Append a node; False: it could not be written, and nothing of it is left."""
        return self.write_many([(node, data)]) == 1

    def write_many(self, nodes: Sequence[Page]) -> int:
        """Append nodes; returns how many were written. Nothing is left of the others."""
        with self._writing:
            if self._is_closed or self.is_paused or not nodes:
                return 0
            records = deque(self._sealer.records(nodes, self.scribe))
            count = 0
            while records:
                try:
                    count += self._append(records)
                except OSError as error:
                    self._pause(error)
                    break
            return count

    def _append(self, records: deque[Record]) -> int:
        """Take as many of the first records as one segment has room for, and write them. Others
        read meanwhile: what is written is in the index afterwards."""
        with self._lock:
            if not self._begin_with(records[0].num_bytes):
                records.popleft()  # larger than the folder may be
                return 0
            segment = self._open
            assert segment is not None
            some, end = list[Record](), segment.num_bytes
            room = min(self._segment_bytes, end + self.limit - self.num_bytes)
            while records and (not some or end + records[0].num_bytes <= room):
                some.append(records.popleft())
                end += some[-1].num_bytes
        try:
            self.scribe.write(self._write_fd, [part for record in some for part in record.parts])
        except OSError:
            with self._lock:
                self._cut(segment, segment.num_bytes)
            raise
        with self._lock:
            self._enter(segment, some)
        return len(some)

    def _begin_with(self, length: int) -> bool:
        """Have a segment open that a record of this length may be appended to; False: it is too
        large for the folder."""
        if not self._make_room(length + len(self._preamble)):
            return False
        if self._open is None or self._open.num_bytes + length > self._segment_bytes:
            self._end_segment()
            self._begin_segment()
        return True

    def _enter(self, segment: Segment, records: Sequence[Record]) -> None:
        for record in records:
            self._index[record.key] = (segment, record.spot(segment.num_bytes))
            segment.keys.append(record.key)
            segment.num_bytes += record.num_bytes
            self.num_bytes += record.num_bytes

    def _cut(self, segment: Segment, length: int) -> None:
        """Take back a part of a record; what follows one would not be found after a restart."""
        with suppress(OSError):
            os.ftruncate(self._write_fd, length)
        self._end_segment()

    def _begin_segment(self) -> None:
        self._number += 1
        path = self.folder / f"{self._number:016x}{SUFFIX}"
        write_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            _write_all(write_fd, self._preamble)
            read_fd = os.open(path, os.O_RDONLY)
        except OSError:  # what follows half a preamble would not be found
            os.close(write_fd)
            with suppress(OSError):
                path.unlink()
            raise
        self._write_fd = write_fd
        self._open = Segment(path, len(self._preamble), time.time(), read_fd)
        self._segments[path] = self._open
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

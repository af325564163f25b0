"""Where the time of requests goes that find pages beyond a GPU's pool: timed calls, what threads
are at, late compiles, and the rates of the pool and of a disk alone. For `gpu_tiers.py`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire.disagg import frames
from quire.disagg.sockets import SocketConnector
from quire.engine.build import Engine
from quire.memory.device_transfer import DeviceTransfer
from quire.tiers.in_order import in_order


class Parts:
    """Seconds in calls of some pieces of one engine from now on, by name; the engine stays so."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: Counter[str] = Counter()
        self._begun = time.perf_counter()
        tiers, transfers = engine.tiers, engine.core.scheduler.kv.transfers
        transfer: Any = engine.runner.transfer
        assert tiers is not None and transfers is not None
        self._time(transfers, "ask", "ready", "load")
        self._time(engine.core.scheduler, "schedule")
        self._time(engine.core, "_idle", "_settle")
        self._time(engine.runner, "execute")
        self._time(transfer, "load", "save", prefix="runner.")
        self._time(tiers, "_pull", "_lift", "_hand_over_all")
        if tiers.device is not None:
            self._time(tiers.device.strip, "bring", prefix="strip.")
        if isinstance(tiers.remote, SocketConnector):
            mover: Any = tiers.remote._mover
            self._time(tiers.remote, "pull", "_take")
            self._time(mover, "take", prefix="mover.")
            self._time(getattr(mover, "_strip", None), "copy", prefix="strip.")
            self._time(frames, "answer_greeting")

    def _time(self, owner: object, *names: str, prefix: str = "") -> None:
        for name in names if owner is not None else ():
            setattr(owner, name, self._timed(prefix + name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            self.seconds.setdefault(name + "@", begun - self._begun)  # when it began first
            try:
                return call(*args, **named)
            finally:
                self.seconds[name] += time.perf_counter() - begun

        return timed

    def ms(self) -> dict[str, float]:
        return {name: round(1e3 * seconds, 2) for name, seconds in self.seconds.items()}


class Sampler(threading.Thread):
    """What a thread is at, seen every few milliseconds."""

    def __init__(self, thread: int) -> None:
        super().__init__(daemon=True)
        self._thread, self._is_over = thread, threading.Event()
        self._seen: Counter[str] = Counter()

    def run(self) -> None:
        last = time.perf_counter()
        while not self._is_over.wait(0.005):
            frame, now = sys._current_frames().get(self._thread), time.perf_counter()
            if frame is not None:
                self._seen[self._place(frame)] += now - last
            last = now

    def _place(self, frame: Any) -> str:
        """The innermost call, and the innermost of ours."""
        inner, ours = frame, frame
        while ours.f_back is not None and "/quire/" not in ours.f_code.co_filename:
            ours = ours.f_back
        names = [f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in (ours, inner)]
        return " > ".join(dict.fromkeys(names))

    def end(self) -> dict[str, float]:
        self._is_over.set()
        self.join()
        return {place: round(seconds, 2) for place, seconds in self._seen.most_common(6)}


def listen(late: list[str]) -> None:
    """Kernels that are compiled from now on, and the seconds each took."""
    from triton import knobs

    def heard(*, metadata: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            late.append(f"{metadata.get('name')} {times.total / 1e6:.2f} s")

    knobs.compilation.listener = heard


def page_rates(engine: Engine, num_tokens: int) -> dict[str, float]:
    """GB/s, read and written, between the pool and rows for so many tokens; and by torch alone."""
    pool, transfer = engine.runner.pool, engine.runner.transfer
    if not isinstance(transfer, DeviceTransfer):
        return {}
    num = min(num_tokens // engine.runner.spec.page_size, len(transfer._strip.rows))
    rows = transfer._strip.rows[:num].clone().view(-1, pool.page_bytes)
    pages = torch.arange(1, len(rows) + 1, device=rows.device)
    region = pool._moved[0]

    def with_torch() -> None:
        pieces = rows[:, region.begin : region.end].view(region.dtype)
        region.data.index_copy_(0, pages, pieces.view(len(rows), *region.data.shape[1:]))

    works: dict[str, Callable[[], object]] = {
        "gather": lambda: pool.gather(pages, rows),
        "scatter": lambda: pool.scatter(pages, rows),
        "torch": with_torch,
    }
    found = {}
    with torch.inference_mode():
        for name, work in works.items():
            seconds = []
            for _ in range(4):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                work()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - begun)
            found[name] = round(2e-9 * rows.nbytes / min(seconds), 1)
    return found


def read_rates(folder: Path) -> dict[str, float]:
    """GB/s of the disk alone: 512 MiB of the segments in pieces of 2 MiB, by threads."""
    found = {}
    for threads in (1, 4, 12):
        drop_from_cache(folder)
        pieces = [
            (path, at)
            for path in sorted(folder.glob("*.pages"))
            for at in range(0, path.stat().st_size, 2 << 20)
        ][:256]
        begun, total = time.perf_counter(), 0
        for size in in_order(read_piece, pieces, "read", threads):
            total += size
        found[str(threads)] = round(1e-9 * total / (time.perf_counter() - begun), 2)
    return found


def drop_from_cache(folder: Path) -> None:
    """Read them from the disk next time, as far as the system does as it is told."""
    for path in folder.glob("*.pages"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_piece(piece: tuple[Path, int]) -> int:
    fd = os.open(piece[0], os.O_RDONLY)
    try:
        return len(os.pread(fd, 2 << 20, piece[1]))
    finally:
        os.close(fd)

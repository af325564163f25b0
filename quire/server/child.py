"""Child: a process that the supervisor keeps alive, and what it knows of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

CRASH_WINDOW_S = 600.0


@dataclass(slots=True)
class Child:
    """A process we keep alive, and what we know of it."""

    name: str
    module: str
    process: subprocess.Popen[bytes] | None = None
    beat_fd: int = -1
    beaten: float = 0.0
    crashes: deque[float] = field(default_factory=deque)
    not_before: float = 0.0
    settings: bytes = b""  # what it is told at each start

    def start(self) -> None:
        beat_read, beat_write = os.pipe()
        os.set_blocking(beat_read, False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(beat_write)],
            stdin=subprocess.PIPE,
            pass_fds=(beat_write,),
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        os.close(beat_write)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died already; its exit code will say so
            self.process.stdin.write(self.settings + b"\n")
            self.process.stdin.flush()
        self.beat_fd, self.beaten = beat_read, time.monotonic()

    def listen(self) -> None:
        if self.beat_fd < 0:
            return
        try:
            if os.read(self.beat_fd, 4096):
                self.beaten = time.monotonic()
        except BlockingIOError:
            pass

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def count_crash(self) -> int:
        """How many there were of late, with this one."""
        now = time.monotonic()
        self.crashes.append(now)
        while self.crashes and now - self.crashes[0] > CRASH_WINDOW_S:
            self.crashes.popleft()
        return len(self.crashes)

    def dump_and_kill(self) -> None:
        """It is silent: its stacks first, then its end."""
        self.signal(signal.SIGUSR1)
        time.sleep(0.2)
        self.signal(signal.SIGKILL)

    def clear(self) -> None:
        """Forget the process that ended."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        if self.beat_fd >= 0:
            os.close(self.beat_fd)
        self.process, self.beat_fd = None, -1

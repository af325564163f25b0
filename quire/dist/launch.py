"""launch: the processes of other ranks, each on the far end of a socket pair.

A process that is started here ends when its socket does: with its parent, whatever the parent dies
of, or when `end` says so. Nobody is left behind and nobody waits for ever. No torch.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

STOP_S = 5.0  # for a process whose socket has ended to end as well


class Rank(Protocol):
    """A rank behind the first, as the first one sees it: a process here or elsewhere."""

    @property
    def rank(self) -> int: ...

    @property
    def link(self) -> socket.socket: ...

    def fate(self, seconds: float = 0.0) -> str | None:
        """How it ended; None: it has not, so far."""
        ...

    def kill(self) -> None:
        """One that hangs hears nothing else."""
        ...

    def reap(self) -> None:
        """Its socket has ended; wait until it has as well."""
        ...


@dataclass(frozen=True, slots=True)
class RankProcess:
    """`Rank` on this machine."""

    rank: int
    process: subprocess.Popen[bytes]
    link: socket.socket

    def fate(self, seconds: float = 0.0) -> str | None:
        """How it ended; None: it has not, so far."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        self.process.kill()

    def reap(self) -> None:
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(module: str, size: int) -> tuple[RankProcess, ...]:
    """Ranks 1 to size - 1, each running `module` with the number of its socket."""
    made: list[RankProcess] = []
    try:
        for rank in range(1, size):
            near, far = socket.socketpair()
            with far:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(far.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # ours is for answers
                    pass_fds=[far.fileno()],
                    start_new_session=True,  # Ctrl-C is for the first rank to judge
                )
            made.append(RankProcess(rank, process, near))
    except BaseException:
        end(made)
        raise
    return tuple(made)


def run_together(module: str, words: Sequence[str]) -> int:
    """A process of `module` for each word, until all have ended; none outlives us. Returns the
    largest exit code."""
    made: list[subprocess.Popen[bytes]] = []
    try:
        for word in words:
            command = [sys.executable, "-m", module, word]
            made.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        return max(process.wait() for process in made)
    finally:
        for process in made:
            process.kill()
            process.wait()


def end(ranks: Sequence[Rank]) -> None:
    """All of them, and reaped."""
    for one in ranks:
        with suppress(OSError):
            one.link.close()
    for one in ranks:
        one.reap()

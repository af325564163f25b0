"""Watch: over what ranks have queued on a device, which nobody waits for on the host.

A thread looks instead. When the oldest verb or graph is not done within the deadline, or another
rank is dead, it lets go of whatever waits; the device then goes on with whatever is there, so
results count only after `check`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import torch

from quire.errors import RankLost

LOOK_S = 0.1  # between looks at what is under way


class Watch:
    def __init__(
        self,
        place: tuple[int, int],
        deadline_s: float,
        lives: Callable[[], bool],
        let_go: Callable[[], object],
    ) -> None:
        """`place`: our rank, of how many. `let_go` of what waits on the device; it must not hold
        whoever has this watch."""
        self._place, self._deadline_s = place, deadline_s
        self._lives, self._let_go = lives, let_go
        self._why: str | None = None  # the others are lost
        self._losing = threading.Lock()
        self._under_way: deque[tuple[torch.cuda.Event, float]] = deque()
        self._begun = time.monotonic()  # of the oldest, or later: when the one before it was done
        threading.Thread(target=_look, args=(weakref.ref(self),), name="ranks", daemon=True).start()

    def check(self) -> None:
        """Raises RankLost where the others are."""
        if self._why is not None:
            rank, size = self._place
            raise RankLost(f"rank {rank} of {size} {self._why}")

    def note(self) -> None:
        """A verb was queued. While a graph is captured nothing runs, and nobody waits for it."""
        if torch.cuda.is_current_stream_capturing():
            return
        done = torch.cuda.Event()
        done.record()
        self._under_way.append((done, time.monotonic()))

    def launch(self, replay: Callable[[], object]) -> None:
        """A graph that has verbs in it. Raises RankLost, without a launch, once the others are
        lost: what a graph of NCCL works with may be gone by then."""
        with self._losing:
            self.check()
            replay()
        self.note()

    def lose(self, why: str) -> None:
        """What waits on the device goes on, with whatever is there."""
        # Not for long: a launch that finds the device's queue full ends when this has let go.
        has_lock = self._losing.acquire(timeout=LOOK_S)
        is_new, self._why = self._why is None, self._why or why
        if has_lock:
            self._losing.release()
        if is_new:
            self._let_go()

    def look(self) -> bool:
        """After whoever is late or dead; whether to look again."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
            self._begun = time.monotonic()
        if self._under_way and self._why is None:
            waited = time.monotonic() - max(self._begun, self._under_way[0][1])
            if waited > self._deadline_s:
                self.lose(f"heard nothing of the others within {self._deadline_s:g} s")
            elif not self._lives():
                self.lose("lost touch with another rank, which is dead")
        return self._why is None


def _look(watched: weakref.ref[Watch]) -> None:
    """For as long as anybody has it."""
    goes_on = True
    while goes_on:
        time.sleep(LOOK_S)
        watch = watched()
        goes_on = watch is not None and watch.look()
        del watch


def aside(
    begin: Callable[[], None], seconds: float, lives: Callable[[], bool], what: str
) -> None:
    """Meet the others in a thread: what does it waits without an end. Raises RankLost."""
    failed: list[RuntimeError] = []
    met = threading.Event()

    def meet() -> None:
        try:
            begin()
            met.set()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=meet, name="meet", daemon=True)
    thread.start()
    until = time.monotonic() + seconds + LOOK_S
    while thread.is_alive() and time.monotonic() < until and lives():
        thread.join(LOOK_S)
    if not met.is_set():
        why = str(failed[0]).splitlines()[0] if failed else "somebody is missing"
        raise RankLost(f"{what} within {seconds:g} s: {why}")

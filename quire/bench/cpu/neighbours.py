"""How much of the machine other programs used during a turn.

Threads that spin while they wait for each other lose most of their speed to a busy neighbour, and
engines differ in that: a figure from a busy machine says little.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

STAT = Path("/proc/stat")
NOTABLE = 0.2  # cores


class Neighbours:
    """Starts to count when it is made."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._busy, self._ours = _busy_seconds(), _our_seconds()

    def cores(self) -> float | None:
        """Cores that were busy with other programs, in the mean; None where nobody counts."""
        busy, ours = _busy_seconds(), _our_seconds()
        if busy is None or self._busy is None:
            return None
        seconds = time.perf_counter() - self._at
        return max(0.0, busy - self._busy - (ours - self._ours)) / seconds


def _busy_seconds() -> float | None:
    try:
        text = STAT.read_text(encoding="ascii")
    except OSError:  # not Linux
        return None
    return busy_ticks(text) / os.sysconf("SC_CLK_TCK")


def busy_ticks(stat: str) -> int:
    """Of all CPUs together: everything but idle time, time waiting for disks and time stolen.

    >>> busy_ticks("cpu  10 1 5 900 7 2 3 40 0 0")
    21
    """
    user, nice, system, _, _, irq, soft = map(int, stat.split()[1:8])
    return user + nice + system + irq + soft


def _our_seconds() -> float:
    """Of this process and of the children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)

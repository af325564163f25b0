"""Lifeline: how a child process and its supervisor know of each other's death.

Parent to child: the child's standard input carries one line of settings and then stays open; when
it ends, the parent is gone, and so is the child at once. On Linux the kernel is asked for the same,
so that even a child stuck in native code goes. Child to parent: a beat written to a pipe every
second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import msgspec

T = TypeVar("T")
BEAT_S = 1.0
ORPHANED = 75
_PR_SET_PDEATHSIG = 1


@cache
def prctl() -> Callable[[int, int], int]:
    """Look it up before a fork: a child whose parent has threads must not wait for the loader."""
    found: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).prctl
    return found


def die_with_parent() -> None:
    """Ask the kernel to kill us with our parent; elsewhere the end of stdin must do."""
    if sys.platform == "linux":
        prctl()(_PR_SET_PDEATHSIG, signal.SIGKILL)


def begin(settings_type: type[T], beat_fd: int) -> T:
    """Read our settings, watch the parent, start to beat. Call this first in a child."""
    die_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what it means is for the parent to say
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=settings_type)
    threading.Thread(target=_watch_parent, name="lifeline", daemon=True).start()
    threading.Thread(target=_beat, args=(beat_fd,), name="heart", daemon=True).start()
    return settings


def _watch_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(ORPHANED)


def _beat(beat_fd: int) -> None:
    while True:
        try:
            os.write(beat_fd, b".")
        except BlockingIOError:
            pass  # the parent is slow to read; it will see this beat in the others
        except OSError:
            os._exit(ORPHANED)
        time.sleep(BEAT_S)

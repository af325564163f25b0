"""Beats: how a rank that loads says that it still does.

Loading takes as long as it takes, so the first rank waits for no deadline there but for silence. A
thread of its own beats, so a rank that reads for minutes is heard, and one that was stopped, or
that holds the interpreter for ever, is not. Steps have a deadline of their own.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from quire.engine import rank_messages as msg

BEAT_S = 1.0


@contextmanager
def beating(
    link: socket.socket, say: Callable[[msg.Report], None], every_s: float = BEAT_S
) -> Iterator[None]:
    """`say` beats over `link` for as long as this lasts, and not once more after it."""
    is_over = threading.Event()

    def beat() -> None:
        with suppress(OSError):  # who hears the orders notices that the link has ended
            while not is_over.wait(every_s):
                if _has_room(link):
                    say(msg.Beat())

    thread = threading.Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _has_room(link: socket.socket) -> bool:
    """Whether a beat can be left there: one that waited would keep our last words waiting too."""
    looked_at = select.poll()
    looked_at.register(link, select.POLLOUT)
    return bool(looked_at.poll(0))

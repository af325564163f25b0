"""heap_at_rest: while a batch runs, the garbage collector leaves alone what was there before it.

A full collection walks every container of the process, and torch brings hundreds of thousands: once
in some thousand steps everybody's next token would come 40 to 140 ms late. Frozen, they are not
walked; what the batch itself makes is, as ever. Freezing and thawing move a list and cost nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERPRETERS_OWN = 1000  # more than Python 3.12 freezes by itself, less than any frozen heap


@contextmanager
def heap_at_rest() -> Iterator[None]:
    """Only for as long as it takes: in a caller's process, what he drops meanwhile must be found
    afterwards. A heap that somebody has frozen already is his and stays as it is."""
    if gc.get_freeze_count() > INTERPRETERS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

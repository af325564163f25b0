"""When the garbage collector rests: while an engine is built, and in part while a batch runs.

Building imports torch and makes what lives as long as the engine. Collections on the way walk ever
more objects, find nothing, and take a tenth of the time to the first token.

A full collection walks every container of the process, and torch brings hundreds of thousands: once
in some thousand steps everybody's next token would come 40 to 190 ms late. Steps leave no cycles
behind, so nothing is lost by waiting for the end of the batch.

The engine process of a server owns its heap and freezes it instead (`server/engine_main.py`). In a
caller's process that would hide the caller's garbage: freezing resets the count of objects that
triggers a full collection, so a loop of small batches would never have one.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NEVER = 1 << 30


@contextmanager
def no_full_collection() -> Iterator[None]:
    young, middle, full = gc.get_threshold()
    if full == NEVER:  # another thread's batch, which will put it back
        yield
        return
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)


@contextmanager
def no_collection() -> Iterator[None]:
    """Afterwards all that was made counts as old: only a full collection walks it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else the caller has frozen objects, and wants them so
            gc.freeze()
            gc.unfreeze()  # to the oldest generation, without a walk
        gc.enable()


def return_heap() -> None:
    """Give freed memory back to the system: loading frees much at once, and glibc keeps it."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))

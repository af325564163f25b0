"""Rooms: memory of the host in pieces of one node, used again and again.

A room is free again when nobody has it any more: the shelf, a lease, a thread that writes it, a
copy under way. It looks like any other buffer, so none of them knows. The one that was left last is
taken first: memory that was touched before is several times faster to fill than memory that is new.
Where a device copies, all of it is locked before the first request, since locking takes a while and
stops the device. Elsewhere it costs nothing until it is used.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np

from quire.errors import NotSupported
from quire.memory.lanes import register, unregister


class Rooms:
    """
    >>> rooms = Rooms(2, node_bytes=4096, is_locked=False)
    >>> one, two, three = rooms.take(), rooms.take(), rooms.take()
    >>> len(one), three, rooms.num_free
    (4096, None, 0)
    >>> del one
    >>> rooms.num_free
    1
    """

    def __init__(self, num: int, node_bytes: int, is_locked: bool) -> None:
        self.node_bytes = node_bytes
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(1, num * node_bytes), private)
        memory.madvise(mmap.MADV_HUGEPAGE)  # a tenth of the time to lock, or to touch
        self._bytes = np.frombuffer(memory, np.uint8)
        self._free = deque(range(num))  # taken from the front, which is where they go back
        self._is_locked = is_locked
        if is_locked:
            memory.madvise(mmap.MADV_DONTFORK)  # a fork would copy all that is locked
        if is_locked and (wrong := register(self._bytes.ctypes.data, len(self._bytes))):
            raise NotSupported(
                f"cannot lock {len(self._bytes)} bytes of memory for pages ({wrong}); ask for less"
                " with kv_host_memory"
            )

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> memoryview | None:
        """None: all are in use."""
        try:
            index = self._free.popleft()
        except IndexError:
            return None
        piece = self._bytes[index * self.node_bytes : (index + 1) * self.node_bytes]
        weakref.finalize(piece, self._free.appendleft, index).atexit = False
        return piece.data

    def close(self) -> None:
        """Unlock the memory; it stays for whoever still has a room."""
        if self._is_locked:
            self._is_locked = False
            unregister(self._bytes.ctypes.data)

"""NativeScribe: digests and files by a thread of the lowest priority (`src/scribe.c`).

It works while a step leaves a core idle, which takes next to nothing from the step. The thread of
Python that asks waits without the GIL, at its usual priority: a thread that holds the GIL and is
passed over by all others would hold up the engine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_size_t, c_void_p
from itertools import chain

import numpy as np

from quire.kv.tier_index import Buffer
from quire.native.library import Library

PAD = 64  # bytes of a block of SHA-256
DIGEST = 32


class Piece(ctypes.Structure):
    """`struct iovec` of the system."""

    _fields_ = (("address", c_void_p), ("size", c_size_t))


class NativeScribe:
    """`tiers.scribe.Scribe`."""

    def __init__(self, library: Library) -> None:
        """Only where `library.can_seal()`."""
        self._library = library
        self._patient = self._thread = library.scribe()

    def hurry(self) -> None:
        self._thread = None  # the caller's own, at the usual priority

    def take_time(self) -> None:
        self._thread = self._patient

    def digests(self, secret: bytes, records: Sequence[Sequence[bytes | Buffer]]) -> list[bytes]:
        assert len(secret) <= PAD and len({len(record) for record in records}) == 1
        padded = secret.ljust(PAD, b"\0")
        pads = bytes(byte ^ 0x36 for byte in padded) + bytes(byte ^ 0x5C for byte in padded)
        pieces = _pieces(list(chain.from_iterable(records)))
        each = len(records[0])
        made = self._library.seal(self._thread, pads, ctypes.addressof(pieces), each, len(records))
        return [made[at : at + DIGEST] for at in range(0, len(made), DIGEST)]

    def write(self, fd: int, parts: Sequence[bytes | Buffer]) -> None:
        pieces = _pieces(parts)
        done = self._library.write(self._thread, fd, ctypes.addressof(pieces), len(pieces))
        if done < 0:
            raise OSError(-done, os.strerror(-done))


def _pieces(parts: Sequence[bytes | Buffer]) -> ctypes.Array[Piece]:
    """Where these lie; they must stay there."""
    made = (Piece * len(parts))()
    for piece, part in zip(made, parts, strict=True):
        piece.address = np.frombuffer(part, np.uint8).ctypes.data if len(part) else None
        piece.size = len(part)
    return made

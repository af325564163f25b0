"""Scribe: who makes digests of pages and writes them to a file, and at what priority.

`PlainScribe` is Python's own, for machines without the native library or without instructions for
SHA-256; `native/scribe.py` gives way to whatever computes. Both make the same bytes.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from typing import Protocol

from quire.kv.tier_index import Buffer

MOST = 512  # pieces of one call of the system


class Scribe(Protocol):
    def digests(self, secret: bytes, records: Sequence[Sequence[bytes | Buffer]]) -> list[bytes]:
        """HMAC-SHA256 of each record, its pieces one after the other; as many in each."""
        ...

    def write(self, fd: int, parts: Sequence[bytes | Buffer]) -> None:
        """All of them where the file stands. Raises OSError; then a part may be written."""
        ...

    def hurry(self) -> None:
        """Somebody waits for what is left to be written, until `take_time`."""
        ...

    def take_time(self) -> None: ...


class PlainScribe:
    def digests(self, secret: bytes, records: Sequence[Sequence[bytes | Buffer]]) -> list[bytes]:
        return [_digest(secret, record) for record in records]

    def write(self, fd: int, parts: Sequence[bytes | Buffer]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            done = os.writev(fd, left[:MOST])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]

    def hurry(self) -> None:
        """It gives way to nobody."""

    def take_time(self) -> None:
        """Likewise."""


def _digest(secret: bytes, parts: Sequence[bytes | Buffer]) -> bytes:
    made = hmac.new(secret, digestmod="sha256")
    for part in parts:
        made.update(part)
    return made.digest()

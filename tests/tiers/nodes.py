"""Nodes whose content follows from their number, so that any reader knows what is right."""

from __future__ import annotations

import random
from hashlib import blake2b
from pathlib import Path

from quire.kv.tier_index import Wanted
from quire.tiers.disk import DiskShelf
from quire.tiers.segment import Sealer

SECRET, MARK = b"s" * 32, b"m" * 32
DATA_BYTES = 3000


def node(number: int) -> Wanted:
    tokens = b"".join(((number + i) % 2**31).to_bytes(4, "little") for i in range(4))
    return Wanted(blake2b(number.to_bytes(8, "little")).digest(), tokens)


def data_of(number: int, size: int = DATA_BYTES) -> bytearray:
    return bytearray(random.Random(number).randbytes(size))


def open_shelf(
    folder: Path, limit: int = 64 << 20, mark: bytes = MARK, secret: bytes = SECRET
) -> DiskShelf:
    return DiskShelf(folder, limit, mark, Sealer(secret))


def count_right(shelf: DiskShelf, numbers: range) -> int:
    """How many of these nodes the shelf has; every one it gives must be right."""
    found = 0
    for number in numbers:
        data = shelf.read(node(number))
        if data is not None:
            assert data == data_of(number), f"node {number} is another's, or damaged"
            found += 1
    return found

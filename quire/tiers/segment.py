"""Segments: files that nodes of the prefix tree are appended to, and never changed afterwards.

    segment = magic | fingerprint, 32 | digest of both, 16 | record | record | ...
    record  = head | token ids | pages of all layer groups
    head    = magic, 4 | bytes of ids, u32 | bytes of pages, u64 | key, 64 | digest, 32 | crc32, u32

A head has a checksum of its own, so that an index can be rebuilt from heads alone. The digest is a
keyed one over key, ids and pages, looked at when a record is read: what was cut short, flipped or
written by somebody without the secret is not there. The fingerprint says which model, formats and
kernels the pages are of; a segment with another one is not read at all.
"""

from __future__ import annotations

import hmac
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quire.kv.tier_index import Buffer, Wanted
from quire.tiers.scribe import Scribe

Page = tuple[Wanted, Buffer]

MAGIC = b"quire pages 1\n\0\0"
FINGERPRINT_BYTES, KEY_BYTES, MARK_BYTES = 32, 64, 16
PREAMBLE_BYTES = len(MAGIC) + FINGERPRINT_BYTES + MARK_BYTES
RECORD = b"qpg1"
_HEAD = struct.Struct("<4sIQ64s32s")
_CRC = struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CRC.size
MAX_TOKEN_BYTES = 1 << 20


class Spot(NamedTuple):
    """Where a record lies in its segment; offsets are of its token ids."""

    offset: int
    token_bytes: int
    data_bytes: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.offset + self.token_bytes + self.data_bytes


class Record(NamedTuple):
    """A node as it is written."""

    key: bytes
    parts: tuple[bytes, bytes, Buffer]  # head, token ids, pages
    digest: bytes

    @staticmethod
    def of(key: bytes, tokens: bytes, data: Buffer, digest: bytes) -> Record:
        head = _HEAD.pack(RECORD, len(tokens), len(data), key, digest)
        return Record(key, (head + _CRC.pack(zlib.crc32(head)), tokens, data), digest)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.parts))

    def spot(self, begin: int) -> Spot:
        head, tokens, data = self.parts
        return Spot(begin + len(head), len(tokens), len(data), self.digest)


class Sealer:
    """Makes and checks what only holders of the secret can make."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def preamble(self, fingerprint: bytes) -> bytes:
        mark = hmac.digest(self._secret, MAGIC + fingerprint, "sha256")[:MARK_BYTES]
        return MAGIC + fingerprint + mark

    def digest(self, key: bytes, tokens: bytes, data: bytes | Buffer) -> bytes:
        made = hmac.new(self._secret, key, "sha256")
        made.update(tokens)
        made.update(data)
        return made.digest()

    def records(self, nodes: Sequence[Page], scribe: Scribe) -> list[Record]:
        parts = [(node.key, node.tokens, data) for node, data in nodes]
        seals = scribe.digests(self._secret, parts)
        return [Record.of(*part, seal) for part, seal in zip(parts, seals, strict=True)]

    def read(
        self, fd: int, key: bytes, spot: Spot, tokens: bytes, room: Buffer | None = None
    ) -> Buffer | None:
        """A record's pages, in `room` if they fit it exactly; None: it is not what was written, or
        of other tokens."""
        stored = os.pread(fd, spot.token_bytes, spot.offset)
        if stored != tokens:
            return None
        fits = room is not None and len(room) == spot.data_bytes
        data, at = room if room is not None and fits else bytearray(spot.data_bytes), 0
        view, begin = memoryview(data), spot.offset + spot.token_bytes
        while at < len(data):
            count = os.preadv(fd, [view[at:]], begin + at)
            if count == 0:
                return None
            at += count
        sealed = self.digest(key, stored, data)
        return data if hmac.compare_digest(sealed, spot.digest) else None


def scan(fd: int) -> Iterator[tuple[bytes, Spot]]:
    """(key, spot) of each record up to the end, or to the first head that is damaged."""
    size, at = os.fstat(fd).st_size, PREAMBLE_BYTES
    while at + HEAD_BYTES <= size:
        head = os.pread(fd, HEAD_BYTES, at)
        magic, token_bytes, data_bytes, key, digest = _HEAD.unpack_from(head)
        (crc,) = _CRC.unpack_from(head, _HEAD.size)
        if magic != RECORD or crc != zlib.crc32(head[: _HEAD.size]):
            return
        spot = Spot(at + HEAD_BYTES, token_bytes, data_bytes, digest)
        if token_bytes > MAX_TOKEN_BYTES or spot.end > size:
            return
        yield key, spot
        at = spot.end


def preamble_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(PREAMBLE_BYTES)

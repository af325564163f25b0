"""Whoever writes pages makes the same digests and the same files."""

from __future__ import annotations

import hmac
import os
import random
from pathlib import Path

import pytest

from quire.native.library import find_library
from quire.native.scribe import NativeScribe
from quire.tiers.scribe import PlainScribe, Scribe

LIBRARY = find_library().library
NATIVE = [NativeScribe(LIBRARY)] if LIBRARY is not None and LIBRARY.can_seal() else []
SCRIBES: list[Scribe] = [PlainScribe(), *NATIVE]
LENGTHS = (0, 1, 55, 56, 63, 64, 65, 119, 120, 127, 128, 129, 1000, 70_000)


@pytest.mark.parametrize("scribe", SCRIBES, ids=lambda scribe: type(scribe).__name__)
def test_digests_are_hmacs(scribe: Scribe) -> None:
    """Red when a piece of any length, or a border between two, makes another digest."""
    rng = random.Random(1)
    records = [
        [rng.randbytes(64), bytearray(rng.randbytes(rng.choice(LENGTHS))), rng.randbytes(length)]
        for length in LENGTHS
    ]
    for secret in (b"s" * 32, b"", rng.randbytes(64)):
        want = [hmac.digest(secret, b"".join(record), "sha256") for record in records]
        assert scribe.digests(secret, records) == want


@pytest.mark.parametrize("scribe", SCRIBES, ids=lambda scribe: type(scribe).__name__)
def test_all_pieces_are_written(scribe: Scribe, tmp_path: Path) -> None:
    rng = random.Random(2)
    parts = [rng.randbytes(rng.choice((0, 1, 100, 5000))) for _ in range(1500)]
    with (tmp_path / "file").open("wb", buffering=0) as file:
        scribe.write(file.fileno(), parts)
        scribe.hurry()
        scribe.write(file.fileno(), [memoryview(b"the end")])
        scribe.take_time()
    assert (tmp_path / "file").read_bytes() == b"".join(parts) + b"the end"
    with pytest.raises(OSError, match="No space left"):
        fd = os.open("/dev/full", os.O_WRONLY)
        try:
            scribe.write(fd, [b"x" * 10_000])
        finally:
            os.close(fd)

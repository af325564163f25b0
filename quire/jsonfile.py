"""Read a JSON object from a model folder, trusting nothing about the file.

Size is bounded before reading, and every way the text can be wrong comes out as a CheckpointError
that names the file. Weight-file headers, which are JSON inside a binary file, use `parse_object`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

MAX_JSON_BYTES = 64_000_000


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a file; raises CheckpointError if it is missing, too large or not one."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than {max_bytes} bytes")
    return parse_object(data, str(path))


def read_object_if_any(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """As `read_object`, but a file that is not there reads as an empty object."""
    return read_object(path, max_bytes) if path.is_file() else {}


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse bytes as one JSON object without repeated keys."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}, want an object")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys, other readers the first: refuse the choice.
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0]!r} appears twice")
    return result

"""A GGUF file, written: pairs, descriptions of tensors, aligned data; `load/gguf.py` reads it.

Numbers are stored as uint32 (int32 below zero, uint64 beyond) and float32, which is how files of
this kind state sizes, ids and constants.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from torch import Tensor

from quire.load.gguf_types import GGMLType

ALIGNMENT = 32
VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10
_NUMPY = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11}
_NUMPY |= {"f8": 12, "b1": _BOOL}


@dataclass(frozen=True, slots=True)
class Blob:
    """A tensor, packed; its bytes are made when they are written."""

    name: str
    shape: tuple[int, ...]  # of the weights, row-major
    kind: GGMLType
    data: Callable[[], Tensor]  # uint8

    @property
    def num_bytes(self) -> int:
        count = int(np.prod(self.shape))
        return count // self.kind.block_size * self.kind.block_bytes


def write_gguf(file: IO[bytes], metadata: Mapping[str, Any], blobs: Sequence[Blob]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", VERSION, len(blobs), len(metadata)))
    for key, value in metadata.items():
        file.write(_text(key) + _value(value))
    at = 0
    for blob in blobs:
        dims = blob.shape[::-1]  # the fastest first
        file.write(_text(blob.name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims))
        file.write(struct.pack("<IQ", blob.kind.id, at))
        at += blob.num_bytes + -blob.num_bytes % ALIGNMENT
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    for blob in blobs:
        raw = blob.data().contiguous().reshape(-1).numpy()
        assert raw.nbytes == blob.num_bytes, f"{blob.name}: {raw.nbytes} != {blob.num_bytes}"
        file.write(raw.tobytes())
        file.write(b"\0" * (-raw.nbytes % ALIGNMENT))


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Its type, and it."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return _whole(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.ndarray):
        kind = _NUMPY[value.dtype.newbyteorder("=").str[1:]]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + value.tobytes()
    assert isinstance(value, list), f"{type(value)=}"
    if value and not isinstance(value[0], str):
        return _value(np.array(value, dtype="?" if isinstance(value[0], bool) else "<i4"))
    head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
    return head + b"".join(_text(text) for text in value)


def _whole(value: int) -> bytes:
    if 0 <= value < 1 << 32:
        return struct.pack("<II", _UINT32, value)
    return struct.pack("<Ii", _INT32, value) if value < 0 else struct.pack("<IQ", _UINT64, value)

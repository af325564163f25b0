"""GGUF container: a mapped file whose every header number is checked before it is trusted.

A GGUF file is a list of key-value pairs, a list of tensor descriptions and one data section. All
three are written by strangers, so no count, length, dimension or offset is used to allocate or to
loop before it has been held against the bytes that are really there; what does not fit raises
`CheckpointError` with file, field, value and reason. Memory for the header is therefore bounded by
a small multiple of the file. Names stay as the file has them: `gguf_checkpoint.py` translates.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import CheckpointError
from quire.load.gguf_types import GGML_TYPES, GGMLType

if TYPE_CHECKING:  # whoever only wants the metadata need not pay for torch
    from torch import Tensor

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME_BYTES = 65535
_MAX_NESTING = 3
# Smallest encodings, to bound counts: an empty key + type + one byte; a name + three fields.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_DAMAGED = "the file is damaged or cut short: download or convert it again"


def bad_field(
    path: str | Path, field: str, value: object, reason: str, fix: str = _DAMAGED
) -> CheckpointError:
    """The one shape of complaint about a GGUF file, to be raised by the caller."""
    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return CheckpointError(f"{path}: {field} = {shown}: {reason}; {fix}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is row-major: ggml's dimensions reversed."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        row = self.shape[-1] if self.shape else 1
        return row // self.type.block_size * self.type.block_bytes


class GGUFFile:
    """An opened file: metadata parsed, tensors described, nothing of them read.

    Numeric arrays in `metadata` are numpy arrays, string arrays are lists. Tensors hold the
    mapping alive, so there is no `close`.
    """

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        reader = _Reader(path, buffer)
        self.path = path
        preamble = reader.preamble()
        self.version = preamble.version
        self.metadata: dict[str, Any] = reader.pairs(preamble.num_pairs)
        self.alignment = _alignment(path, self.metadata)
        self.tensors = reader.tensors(preamble.num_tensors, self.alignment)
        self._buffer = buffer

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Maps `path` and parses its header. Raises CheckpointError."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                # Copy-on-write: tensors may be views, and a write to one must not reach the file.
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be opened as GGUF: {e}") from e
        return cls(path, buffer)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Float32 for quantised types; a view in the stored dtype for plain ones. With an index,
        only that one of the first dimension."""
        import torch

        from quire.load.dequant import NATIVE_DTYPES, dequantize

        info = self._info(name)
        if (dtype := NATIVE_DTYPES.get(info.type.name)) is not None:
            count = math.prod(info.shape)
            plain = torch.frombuffer(self._buffer, dtype=dtype, count=count, offset=info.offset)
            plain = plain.view(info.shape)
            return plain if index is None else plain[index]
        return dequantize(self.raw(name, index), info.type)

    def raw(self, name: str, index: int | None = None, only: slice | None = None) -> Tensor:
        """The stored bytes, uint8 [*shape[:-1], row_bytes], as a view of the mapping; with an
        index, of that one of the first dimension; with `only`, of these rows of it.

        Raises CheckpointError where a scale is not finite.
        """
        import torch

        from quire.load.gguf_scales import find_bad_block

        info = self._info(name)
        flat = torch.frombuffer(
            self._buffer, dtype=torch.uint8, count=info.num_bytes, offset=info.offset
        )
        rows = flat.view(*info.shape[:-1], info.row_bytes)
        rows = rows if index is None else rows[index]
        rows = rows if only is None else rows[only]
        if (block := find_bad_block(rows.flatten(), info.type)) is not None:
            where = f"block {block} of {info.type.name}"
            raise bad_field(self.path, f"tensor {name!r}", where, "a scale is not finite")
        return rows

    def _info(self, name: str) -> TensorInfo:
        if (info := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self.path}: no tensor {name!r} among {len(self.tensors)}")
        return info


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 8 or value & (value - 1):
        raise bad_field(path, "general.alignment", value, "want a power of two of at least 8")
    return value


@dataclass(frozen=True, slots=True)
class _Preamble:
    version: int
    num_tensors: int
    num_pairs: int


class _Reader:
    """A position in the file; each method checks, then moves past what it returns."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def preamble(self) -> _Preamble:
        magic = self.buffer[:4]
        if magic != b"GGUF":
            raise bad_field(self.path, "magic", magic, "not a GGUF file", "check the path")
        self.at = 4
        version = self._u32("version")
        if version not in (2, 3):
            big = version & 0xFFFF == 0  # a small number with its bytes swapped
            reason = "big-endian file" if big else "only versions 2 and 3 are read"
            raise bad_field(self.path, "version", version, reason, "convert the model again")
        num_tensors = self._u64("tensor_count")
        num_pairs = self._u64("metadata_kv_count")
        left = self.size - self.at
        self._bound(num_pairs, _MIN_PAIR_BYTES, "metadata_kv_count")
        if num_tensors * _MIN_TENSOR_BYTES + num_pairs * _MIN_PAIR_BYTES > left:
            reason = f"more than {left} header bytes can hold"
            raise bad_field(self.path, "tensor_count", num_tensors, reason)
        return _Preamble(version, num_tensors, num_pairs)

    def pairs(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(count):
            key = self._name(f"metadata key {i}")
            if key in metadata:
                raise bad_field(self.path, f"metadata key {i}", key, "appears twice")
            metadata[key] = self._value(self._u32(f"type of {key!r}"), key, nesting=0)
        return metadata

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for i in range(count):
            info = self._tensor(i, alignment)
            if info.name in infos:
                raise bad_field(self.path, f"name of tensor {i}", info.name, "appears twice")
            infos[info.name] = info
        start = -(-self.at // alignment) * alignment
        placed = {name: self._place(info, start) for name, info in infos.items()}
        self._check_overlap(placed)
        return placed

    def _tensor(self, i: int, alignment: int) -> TensorInfo:
        name = self._name(f"name of tensor {i}")
        num_dims = self._u32(f"dimensions of {name!r}")
        if num_dims > _MAX_DIMS:
            raise bad_field(self.path, f"dimensions of {name!r}", num_dims, f"at most {_MAX_DIMS}")
        dims = [self._u64(f"dimension {d} of {name!r}") for d in range(num_dims)]
        if 0 in dims:
            raise bad_field(self.path, f"shape of {name!r}", dims, "a dimension is zero")
        kind_id = self._u32(f"type of {name!r}")
        if (kind := GGML_TYPES.get(kind_id)) is None:
            fix = "the file may be newer than this reader: use another quantisation"
            raise bad_field(self.path, f"type of {name!r}", kind_id, "unknown tensor type", fix)
        row = dims[0] if dims else 1
        if row % kind.block_size:
            reason = f"{kind.name} rows come in multiples of {kind.block_size}"
            raise bad_field(self.path, f"row length of {name!r}", row, reason)
        # Python integers do not wrap, so the product is the true size whatever the dims say.
        num_bytes = math.prod(dims) // kind.block_size * kind.block_bytes
        offset = self._u64(f"offset of {name!r}")
        if offset % alignment:
            reason = f"not a multiple of the alignment {alignment}"
            raise bad_field(self.path, f"offset of {name!r}", offset, reason)
        return TensorInfo(name, tuple(reversed(dims)), kind, offset, num_bytes)

    def _place(self, info: TensorInfo, start: int) -> TensorInfo:
        """The same tensor with its offset counted from the start of the file."""
        offset = start + info.offset
        if offset + info.num_bytes > self.size:
            value = f"{info.num_bytes} bytes {list(info.shape)} at {offset}"
            reason = f"past the end of the file at {self.size}"
            raise bad_field(self.path, f"tensor {info.name!r}", value, reason)
        return TensorInfo(info.name, info.shape, info.type, offset, info.num_bytes)

    def _check_overlap(self, infos: dict[str, TensorInfo]) -> None:
        # A small file whose tensors all point at the same bytes would unpack without limit.
        end, last = 0, ""
        for info in sorted(infos.values(), key=lambda t: t.offset):
            if info.offset < end:
                reason = f"overlaps tensor {last!r}, which ends at {end}"
                raise bad_field(self.path, f"offset of {info.name!r}", info.offset, reason)
            end, last = info.offset + info.num_bytes, info.name

    def _value(self, kind: int, field: str, nesting: int) -> object:
        if kind == _ARRAY:
            return self._array(field, nesting + 1)
        if kind == _STRING:
            return self._string(field)
        if (dtype := _NUMBERS.get(kind)) is None:
            raise bad_field(self.path, f"type of {field!r}", kind, "unknown metadata type")
        number = self._numbers(dtype, 1, field)
        return self._bools(number, field)[0].item() if kind == _BOOL else number[0].item()

    def _array(self, field: str, nesting: int) -> object:
        if nesting > _MAX_NESTING:
            reason = f"arrays nested more than {_MAX_NESTING} deep"
            raise bad_field(self.path, field, nesting, reason)
        kind = self._u32(f"element type of {field!r}")
        count = self._u64(f"length of {field!r}")
        if kind == _STRING:
            return self._strings(count, field)
        if kind == _ARRAY:
            self._bound(count, _U32.size + _U64.size, f"length of {field!r}")
            return [self._array(field, nesting + 1) for _ in range(count)]
        if (dtype := _NUMBERS.get(kind)) is None:
            raise bad_field(self.path, f"element type of {field!r}", kind, "unknown metadata type")
        numbers = self._numbers(dtype, count, field)
        return self._bools(numbers, field) if kind == _BOOL else numbers

    def _numbers(self, dtype: np.dtype[np.generic], count: int, field: str) -> NDArray[np.generic]:
        self._bound(count, dtype.itemsize, f"length of {field!r}")
        numbers = np.frombuffer(self.buffer, dtype, count, self.at).copy()
        self.at += count * dtype.itemsize
        return numbers

    def _bools(self, numbers: NDArray[np.generic], field: str) -> NDArray[np.generic]:
        if numbers.size and (worst := int(numbers.max())) > 1:
            raise bad_field(self.path, field, worst, "a bool is 0 or 1")
        return numbers.astype(np.bool_)

    def _strings(self, count: int, field: str) -> list[str]:
        """Inlined rather than calling `_string`: vocabularies hold 10^5 of them."""
        self._bound(count, _U64.size, f"length of {field!r}")
        buffer, at, size, unpack = self.buffer, self.at, self.size, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(buffer, at)
                at += 8
                if length > size - at:
                    where = f"string length in {field!r}[{len(strings)}]"
                    raise bad_field(self.path, where, length, f"only {size - at} bytes are left")
                strings.append(buffer[at : at + length].decode())
                at += length
        except struct.error:
            where = f"{field!r}[{len(strings)}]"
            raise bad_field(self.path, where, size - at, "bytes are left, want 8") from None
        except UnicodeDecodeError as e:
            raise bad_field(self.path, f"{field!r}[{len(strings)}]", e.object, str(e)) from None
        self.at = at
        return strings

    def _string(self, field: str) -> str:
        length = self._u64(f"string length of {field!r}")
        self._bound(length, 1, f"string length of {field!r}")
        data = self.buffer[self.at : self.at + length]
        self.at += length
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise bad_field(self.path, field, data[:64], f"not UTF-8: {e.reason}") from None

    def _name(self, field: str) -> str:
        name = self._string(field)
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            reason = f"names have 1 to {_MAX_NAME_BYTES} characters"
            raise bad_field(self.path, f"length of {field}", len(name), reason)
        return name

    def _u32(self, field: str) -> int:
        self._bound(1, _U32.size, field)
        value: int = _U32.unpack_from(self.buffer, self.at)[0]
        self.at += _U32.size
        return value

    def _u64(self, field: str) -> int:
        self._bound(1, _U64.size, field)
        value: int = _U64.unpack_from(self.buffer, self.at)[0]
        self.at += _U64.size
        return value

    def _bound(self, count: int, item_bytes: int, field: str) -> None:
        left = self.size - self.at
        if count * item_bytes > left:
            reason = f"needs {count * item_bytes} bytes, only {left} are left in the file"
            raise bad_field(self.path, field, count, reason)

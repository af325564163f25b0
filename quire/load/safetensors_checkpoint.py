"""SafetensorsCheckpoint: tensors straight out of mapped files, nothing copied, nothing trusted.

A file is an 8-byte length, that many bytes of JSON (name -> dtype, shape, offsets), then raw data.
Every number in that header is checked against the file before any of it is used: sizes must match
shapes, and tensors must tile the data without gap or overlap. Folders with pickled weights are
refused, since unpickling runs code. GGUF files are `gguf_checkpoint.py`'s.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import CheckpointError, OutOfMemory
from quire.jsonfile import parse_object, read_object
from quire.load.checkpoint import Stored
from quire.quant.weight import Weight

MAX_CONFIG_BYTES = 8_000_000
MAX_HEADER_BYTES = 100_000_000
MAX_NAME_CHARS = 512
MAX_DIMS = 16
LENGTH_BYTES = 8
COPIED_AT_ONCE, COPIERS = 4 << 20, 8  # bytes, threads

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

SINGLE_FILE = "model.safetensors"
HEADS_FILE = "medusa_lm_head.safetensors"  # a folder of Medusa heads has it instead
INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"


class SafetensorsCheckpoint:
    """A Hugging Face model folder.

    >>> checkpoint = SafetensorsCheckpoint.open("model")            # doctest: +SKIP
    >>> checkpoint.shape("model.norm.weight")                       # doctest: +SKIP
    (576,)
    """

    def __init__(self, config: Mapping[str, Any], shards: Mapping[str, Shard]) -> None:
        self.config = config
        self._shards = shards  # tensor name -> the file it is in
        self.files: Sequence[Path] = tuple(dict.fromkeys(shard.path for shard in shards.values()))

    @staticmethod
    def open(folder: str | Path) -> SafetensorsCheckpoint:
        """Read the config and all headers, but no weights. Raises CheckpointError."""
        folder = Path(folder)
        config = read_config(folder)
        for name in (SINGLE_FILE, HEADS_FILE):
            if (folder / name).is_file():
                shard = Shard(folder / name)
                return SafetensorsCheckpoint(config, dict.fromkeys(shard.entries, shard))
        if (folder / INDEX_FILE).is_file():
            return SafetensorsCheckpoint(config, _open_shards(folder))
        raise CheckpointError(_no_weights(folder))

    def names(self) -> Sequence[str]:
        """In file order, so that reading them in turn reads the disk in turn."""
        return list(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).entries[name].shape

    def read(self, name: str) -> Tensor:
        return self._shard(name).read(name)

    def stored(self, name: str) -> Stored:
        entry = self._shard(name).entries[name]
        return Stored(str(entry.dtype).removeprefix("torch."), entry.stop - entry.start)

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        return None  # plain numbers only

    def _shard(self, name: str) -> Shard:
        try:
            return self._shards[name]
        except KeyError:
            raise CheckpointError(
                f"no tensor {name!r} among the {len(self._shards)} there are"
            ) from None


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder; raises CheckpointError if there is none."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"no config.json in {folder}: want a Hugging Face model folder (config.json and "
            f"*.safetensors) or a .gguf file"
        )
    return _with_modelopt(read_object(path, MAX_CONFIG_BYTES), folder / MODELOPT_FILE)


def _with_modelopt(config: dict[str, Any], beside: Path) -> dict[str, Any]:
    """ModelOpt used to say how weights are quantised in a file of its own."""
    if config.get("quantization_config") is not None or not beside.is_file():
        return config
    said = read_object(beside, MAX_CONFIG_BYTES).get("quantization")
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{beside} has no quantization object")
    if said.get("quant_algo") is None:
        return config  # the cache alone
    return {**config, "quantization_config": {**said, "quant_method": "modelopt"}}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `start` and `stop` are byte positions in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Shard:
    """One .safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._state = _state_of(file.fileno())
                self._size = self._state.size
                header, data_start = _read_header(file.fileno(), self._size, path)
                self.entries = _check_entries(header, data_start, self._size, path)
                # Private and writable: torch wants a writable buffer, the file stays as it is.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._data: Tensor | None = None  # a copy
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error

    def load(self, pinned: bool = False) -> NDArray[np.uint8]:
        """Copy all of it into memory, in one go: tensors are views of that from now on. Pinned
        memory is torch's, which keeps it for the next file. A file that is written meanwhile is
        refused: it is read, not mapped, since it may also shrink."""
        self._check_size()
        data = _room_for(self._size, pinned)
        copy: NDArray[np.uint8] = data.numpy()
        try:
            with self.path.open("rb") as file:
                is_whole = self._copy_to(copy, file.fileno())
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror}") from error
        if not is_whole:
            raise CheckpointError(
                f"{self.path} was written while it was read; try again once it is complete"
            )
        self._data = data
        return copy

    def _copy_to(self, copy: NDArray[np.uint8], fd: int) -> bool:
        """Whether it is all of the file whose header was read."""
        if _state_of(fd) != self._state:
            return False
        with ThreadPoolExecutor(COPIERS, "file copy") as threads:
            begins = range(0, self._size, COPIED_AT_ONCE)
            are_whole = list(threads.map(partial(_read_part, fd, copy), begins))
        return all(are_whole) and _state_of(fd) == self._state

    def numbers(self) -> Tensor | None:
        """Of all tensors, one after the other; None where they are of several dtypes. Loaded."""
        assert self._data is not None, "not loaded"
        dtypes = {entry.dtype for entry in self.entries.values()}
        start = min((entry.start for entry in self.entries.values()), default=0)
        if len(dtypes) != 1 or start % (dtype := dtypes.pop()).itemsize:
            return None
        return self._data[start:].view(dtype)

    def read(self, name: str) -> Tensor:
        """A view of the mapped file; a copy where the data is not aligned."""
        entry = self.entries[name]
        if self._data is None:
            self._check_size()
        num_bytes = entry.stop - entry.start
        if num_bytes == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._data is not None:
            raw = self._data[entry.start : entry.stop]
        else:
            raw = torch.frombuffer(
                self._map, dtype=torch.uint8, count=num_bytes, offset=entry.start
            )
        if entry.dtype is torch.bool:
            return raw.ne(0).reshape(entry.shape)  # any byte but 0 and 1 is no bool to torch
        if entry.start % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).reshape(entry.shape)

    def _check_size(self) -> None:
        # Touching mapped memory past the end of a file kills the process.
        if (size := self._map.size()) < self._size:
            raise CheckpointError(
                f"{self.path} shrank from {self._size} to {size} bytes while open"
            )


class _State(NamedTuple):
    """Of a file; another one when somebody has written it."""

    device: int
    inode: int
    size: int
    written_ns: int


def _state_of(fd: int) -> _State:
    facts = os.fstat(fd)
    return _State(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


def _room_for(num_bytes: int, pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise OutOfMemory(
            f"no {num_bytes:,} bytes of {'locked ' if pinned else ''}host memory for a file"
            f" ({str(error).splitlines()[0]}); make room on the host"
        ) from None


def _read_part(fd: int, copy: NDArray[np.uint8], begin: int) -> bool:
    """Whether all of it was there."""
    part = copy[begin : begin + COPIED_AT_ONCE].data
    at = 0
    while at < len(part):
        got = os.preadv(fd, [part[at:]], begin + at)
        if got == 0:
            return False
        at += got
    return True


def _open_shards(folder: Path) -> dict[str, Shard]:
    path = folder / INDEX_FILE
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map object")
    shards = {
        name: _open_shard(folder, name, path)
        for name in dict.fromkeys(map(str, weight_map.values()))
    }
    for name, file in weight_map.items():
        if name not in shards[str(file)].entries:
            raise CheckpointError(f"{path} puts tensor {name!r} in {file}, which does not hold it")
    # Shard by shard, in file order.
    return {
        name: shard
        for file, shard in shards.items()
        for name in shard.entries
        if weight_map.get(name) == file
    }


def _open_shard(folder: Path, name: str, index: Path) -> Shard:
    is_plain = name == os.path.basename(name) and "\\" not in name and "\0" not in name
    if not is_plain or not name.endswith(".safetensors"):
        raise CheckpointError(f"{index} names shard {name!r}, want a *.safetensors file beside it")
    if not (folder / name).is_file():
        raise CheckpointError(f"{index} names shard {name}, which is missing from {folder}")
    return Shard(folder / name)


def _no_weights(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return (
            f"{folder} has only pickled weights ({pickled[0]}), which can run code when read: "
            "convert them to safetensors first"
        )
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    return f"no {SINGLE_FILE} or {INDEX_FILE} in {folder}; found {found}"


def _read_header(fd: int, size: int, path: Path) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
    room = size - LENGTH_BYTES
    if room < 2 or not 2 <= length <= min(room, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path} says its header has {length} bytes, but the file has {size} and the most "
            f"is {MAX_HEADER_BYTES}: it is damaged or not safetensors"
        )
    header = parse_object(os.pread(fd, length, LENGTH_BYTES), f"the header of {path}")
    return header, LENGTH_BYTES + length


def _check_entries(
    header: dict[str, Any], data_start: int, size: int, path: Path
) -> dict[str, Entry]:
    """Entries by name, in file order; together they must cover the data exactly."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: __metadata__ is not an object")
    entries = [
        (name, _check_entry(name, fields, data_start, path)) for name, fields in header.items()
    ]
    entries.sort(key=lambda pair: (pair[1].start, pair[1].stop))
    end = data_start
    for name, entry in entries:
        if entry.start != end:
            what = "overlaps the one before" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} at byte {entry.start} {what} ({end})")
        end = entry.stop
    if end != size:
        raise CheckpointError(f"{path}: tensors end at byte {end}, the file at {size}")
    return dict(entries)


def _check_entry(name: str, fields: object, data_start: int, path: Path) -> Entry:
    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name[:MAX_NAME_CHARS]!r} {what}")

    if len(name) > MAX_NAME_CHARS:
        raise damaged(f"has a name of {len(name)} characters, want at most {MAX_NAME_CHARS}")
    if not isinstance(fields, dict):
        raise damaged("is not described by an object")
    code = fields.get("dtype")
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    dtype = DTYPES.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise damaged(f"has dtype {str(code)[:32]!r}, want one of {', '.join(DTYPES)}")
    if shape is None or len(shape) > MAX_DIMS:
        raise damaged(
            f"has shape {str(fields.get('shape'))[:64]}, want up to {MAX_DIMS} whole numbers >= 0"
        )
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(f"has data_offsets {str(fields.get('data_offsets'))[:64]}, want [begin, end]")
    # Dimensions beside a zero must still fit torch's 64-bit strides.
    if math.prod(max(dim, 1) for dim in shape) >= 1 << 62:
        raise damaged(f"has shape {str(shape)[:64]}, which is too large")
    want, got = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if want != got:
        raise damaged(f"of shape {shape} and dtype {code} takes {want} bytes, its data has {got}")
    return Entry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _counts(value: object) -> list[int] | None:
    """The value if it is a list of whole numbers >= 0; True is no number here."""
    is_good = isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
    return value if is_good and isinstance(value, list) else None

"""A pack: the panels of one model in a file, to be mapped and read where they lie.

    magic, length and SHA-256 of the header | header, JSON | tensors, each at a multiple of 64

The header gives the file's length and a digest of blocks spread over it, so a file that was cut
short or never reached the disk is noticed without reading it whole. Pages are mapped read-only and
shared: processes with the same model have it in memory once. `packs.py` says where packs are.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quire.native.panels import ADDRESSES, NUMBERS, Panels

MAGIC = b"quire pack 1\n\0\0\0"
PREAMBLE_BYTES = len(MAGIC) + 8 + 32
MAX_HEADER_BYTES = 1 << 28
ALIGNMENT = 64  # a line of the cache, and the widest vector
NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KINDS}


class DamagedPack(Exception):
    """The file is not what was written."""


def write_pack(file: BinaryIO, entries: Mapping[str, Sequence[Panels]]) -> None:
    """Raises OSError; the file is then worth nothing."""
    places: dict[str, list[dict[str, Any]]] = {}
    end = 0
    for name, parts in entries.items():
        places[name] = []
        for part in parts:
            tensors: list[tuple[str, list[int], int] | None] = []
            for tensor in part.tensors:
                if tensor is None:
                    tensors.append(None)
                    continue
                kind = str(tensor.dtype).removeprefix("torch.")
                tensors.append((kind, list(tensor.shape), end))
                end = _aligned(end + tensor.numel() * tensor.element_size())
            places[name].append({"numbers": part.numbers, "tensors": tensors})
    samples, begin = "0" * 64, 0
    for _ in range(2):  # once to know where data begins, once with the digest of it
        header = json.dumps({"entries": places, "num_bytes": end, "samples": samples}).encode()
        begin = _aligned(PREAMBLE_BYTES + len(header))
        file.seek(0)
        file.write(MAGIC + len(header).to_bytes(8, "little") + hashlib.sha256(header).digest())
        file.write(header)
        if samples == "0" * 64:
            _write_data(file, begin, entries)
            file.truncate(begin + end)
            file.flush()
            samples = sample_digest(file.fileno(), begin, end)


def _write_data(file: BinaryIO, begin: int, entries: Mapping[str, Sequence[Panels]]) -> None:
    at = begin
    for parts in entries.values():
        for tensor in (t for part in parts for t in part.tensors if t is not None):
            file.seek(at)
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            at = _aligned(at + tensor.numel() * tensor.element_size())


class PackFile:
    """A mapped pack."""

    def __init__(self, entries: Mapping[str, list[dict[str, Any]]], data: Tensor) -> None:
        self._entries, self._data = entries, data  # data [bytes]

    @staticmethod
    def open(path: Path) -> PackFile:
        """Raises OSError where there is none, DamagedPack where it is not whole."""
        with path.open("rb") as file:
            entries, begin, end = _read_header(file.fileno())
            pages = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        pages.madvise(mmap.MADV_WILLNEED)
        with warnings.catch_warnings():  # that it cannot be written is what is wanted
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            data = torch.frombuffer(pages, dtype=torch.uint8)[begin:]
        return PackFile(entries, data)

    @property
    def num_bytes(self) -> int:
        return self._data.numel()

    def find(self, name: str) -> list[Panels] | None:
        if (parts := self._entries.get(name)) is None:
            return None
        return [Panels.of(self._tensors(part), part["numbers"]) for part in parts]

    def names(self) -> Iterator[str]:
        yield from self._entries

    def _tensors(self, part: dict[str, Any]) -> list[Tensor | None]:
        return [None if place is None else self._tensor(*place) for place in part["tensors"]]

    def _tensor(self, kind: str, shape: list[int], at: int) -> Tensor:
        dtype = DTYPES[kind]
        raw = self._data[at : at + math.prod(shape) * dtype.itemsize]
        return raw.view(dtype).view(shape)


def _read_header(fd: int) -> tuple[dict[str, list[dict[str, Any]]], int, int]:
    """Entries, where their data begins, and where the file ends."""
    size, preamble = os.fstat(fd).st_size, os.pread(fd, PREAMBLE_BYTES, 0)
    length = int.from_bytes(preamble[len(MAGIC) : len(MAGIC) + 8], "little")
    if preamble[: len(MAGIC)] != MAGIC or length > min(size, MAX_HEADER_BYTES):
        raise DamagedPack("it does not begin as a pack does")
    header = os.pread(fd, length, PREAMBLE_BYTES)
    if hashlib.sha256(header).digest() != preamble[-32:]:
        raise DamagedPack("its header does not match its digest")
    said, begin = json.loads(header), _aligned(PREAMBLE_BYTES + length)
    num_bytes = said["num_bytes"]
    if size != begin + num_bytes:
        raise DamagedPack(f"it has {size} bytes, {begin + num_bytes} were written")
    if sample_digest(fd, begin, num_bytes) != said["samples"]:
        raise DamagedPack("its data does not match its digest")
    sizes = {
        (len(part["tensors"]), len(part["numbers"]))
        for ps in said["entries"].values()
        for part in ps
    }
    if sizes - {(len(ADDRESSES), len(NUMBERS))}:
        raise DamagedPack("its panels have other fields")
    return said["entries"], begin, size


def sample_digest(fd: int, begin: int, num_bytes: int) -> str:
    """Of blocks spread evenly over a stretch of the file, the first and the last among them."""
    digest, last = hashlib.sha256(), max(0, num_bytes - SAMPLE_BYTES)
    for i in range(NUM_SAMPLES):
        at = last * i // (NUM_SAMPLES - 1)
        digest.update(os.pread(fd, min(SAMPLE_BYTES, num_bytes), begin + at))
    return digest.hexdigest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

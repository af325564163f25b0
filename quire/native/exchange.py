"""SharedComm: ranks of one machine that put rows into memory they all have mapped.

A gather is a copy into the shared memory and one out of it, with a few microseconds of waiting
between; `src/exchange.c` has the rules. Large gathers go in pieces. Somebody who does not come is
waited for in short stretches, and in between `is_whole` is asked whether everybody still lives.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import RankLost
from quire.native.library import Library

SLOT_BYTES = 1 << 20
LINE = 64  # bytes of a mark
LOOK_S = 0.1  # between looks at whether all live


class Exchange(ctypes.Structure):
    """`qn_exchange` of quire_native.h."""

    _fields_ = (
        ("shared", c_void_p),
        ("slot_bytes", c_int64),
        *((name, c_int32) for name in ("rank", "size")),
    )


def make_memory(path: Path, size: int) -> None:
    """For so many ranks; all of it zeros."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, _num_bytes(size))
    os.close(descriptor)


def _num_bytes(size: int) -> int:
    return size * LINE + 2 * size * SLOT_BYTES


class SharedComm:
    """`dist.comm.Comm`."""

    def __init__(
        self,
        memory: Path,
        ranks: tuple[int, int],
        deadline_s: float,
        library: Library,
        is_whole: Callable[[], bool] = lambda: True,
    ) -> None:
        """`memory` is a file of `make_memory`; `ranks`: ours, of how many."""
        self.rank, self.size = ranks
        self.deadline_s, self._is_whole, self._library = deadline_s, is_whole, library
        with memory.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _num_bytes(self.size))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)  # keeps the mapping in place
        self._all = Exchange(self._bytes.data_ptr(), SLOT_BYTES, self.rank, self.size)
        self._turn = 0

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        out = x.new_empty(len(x), sum(widths))
        begins = [sum(widths[:rank]) for rank in range(self.size)]
        views = [out[:, b : b + width] for b, width in zip(begins, widths, strict=True)]
        self._exchange(x, views)
        return out

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        out = x.new_empty(sum(counts), x.shape[1])
        self._exchange(x, list(out.split(list(counts))))
        return out

    def merge(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        every = x.new_empty(self.size, *x.shape)
        self._exchange(x, list(every))
        # Bits, not numbers: a sum of floats would turn -0.0 into 0.0.
        merged = every[0].view(torch.uint8)
        for other in every[1:]:
            merged |= other.view(torch.uint8)
        return every[0]

    def tell(self, x: Tensor) -> None:
        rows = x.view(1, -1)
        nothing = rows[:0]
        others = [nothing] * (self.size - 1)
        self._exchange(rows if self.rank == 0 else nothing, [rows, *others])

    def check(self) -> None:
        """Every verb has waited."""

    def _exchange(self, own: Tensor, into: Sequence[Tensor]) -> None:
        """Our rows to everybody, and everybody's into their places here, some rows at a time."""
        own = own if own.stride(-1) == 1 or own.numel() == 0 else own.contiguous()
        widest = max((rows.shape[1] * rows.element_size() for rows in into), default=0)
        assert widest <= SLOT_BYTES, f"rows of {widest} bytes"
        each = SLOT_BYTES // max(1, widest)
        most = max(len(rows) for rows in into)
        for first in range(0, most, each):
            some = slice(first, first + each)
            self._turn += 1
            self._library.put(self._all, self._turn, *_place(own[some]))
            for rank, rows in enumerate(into):
                self._take(rank, rows[some])

    def _take(self, rank: int, rows: Tensor) -> None:
        until = time.monotonic() + self.deadline_s
        place = _place(rows)
        while not self._library.take(self._all, self._turn, rank, *place, LOOK_S):
            if not self._is_whole() or time.monotonic() > until:
                raise RankLost(
                    f"rank {self.rank} of {self.size} heard nothing of rank {rank} within"
                    f" {self.deadline_s:g} s"
                )


def _place(rows: Tensor) -> tuple[int, int, int, int]:
    """Address, rows, bytes of a row, bytes from a row to the next."""
    size = rows.element_size()
    return rows.data_ptr(), len(rows), rows.shape[1] * size, rows.stride(0) * size

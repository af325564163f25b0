"""Board: what all API processes have taken together, so that limits hold across them exactly.

A file mapped into each of them: a row for each process, with its open requests, sequences, tokens
and the requests of each key. Everyone writes only the own row. Who asks for a place holds a lock of
the kernel from looking to taking: microseconds for each request, nothing for each token. The lock
of a process that dies is free; its row is cleared by the supervisor.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

BOARD = "admission.board"
_COUNTS = 3  # open requests, sequences, tokens; then the requests of each key
_BYTES = 8


class Taken(NamedTuple):
    """What other processes hold."""

    num_open: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    of_key: int = 0
    keys: frozenset[str] = frozenset()  # with open requests


class Alone:
    """The board of a single API process: there are no others."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def others(self, key: str) -> Taken:
        return Taken()

    def write(self, counts: tuple[int, int, int], key: str, of_key: int) -> None:
        pass


class SharedBoard(Alone):
    """
    `keys` are all ids that requests can be of, in the same order in every process.
    """

    def __init__(self, folder: Path, num_processes: int, index: int, keys: Sequence[str]) -> None:
        self._columns = {key: _COUNTS + at for at, key in enumerate(keys)}
        width = _COUNTS + len(keys)
        self._file = os.open(folder / BOARD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = width * num_processes * _BYTES
        os.ftruncate(self._file, size)
        cells = memoryview(mmap.mmap(self._file, size)).cast("q")
        rows = [cells[at * width : (at + 1) * width] for at in range(num_processes)]
        self._own = rows[index] if index >= 0 else rows[0][:0]
        self._rows, self._others = rows, [row for at, row in enumerate(rows) if at != index]

    @contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def others(self, key: str) -> Taken:
        rows, column = self._others, self._columns[key]
        open_, sequences, tokens = (sum(row[at] for row in rows) for at in range(_COUNTS))
        keys = frozenset(name for name, at in self._columns.items() if any(row[at] for row in rows))
        return Taken(open_, sequences, tokens, sum(row[column] for row in rows), keys)

    def write(self, counts: tuple[int, int, int], key: str, of_key: int) -> None:
        self._own[0], self._own[1], self._own[2] = counts
        self._own[self._columns[key]] = of_key

    def clear(self, index: int) -> None:
        """The process of this row is gone, and with it all it held."""
        for at in range(len(self._rows[index])):
            self._rows[index][at] = 0

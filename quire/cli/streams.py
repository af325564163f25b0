"""Standard streams that are closed, full, or abandoned by their reader.

A process may be started without any of the three (`>&-`): Python then has None for it, and the next
file or socket gets its number. `main.py` opens them before anything else does, and learns from
`Output` whether it was the output that failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO


def open_closed_streams() -> None:
    """A closed stdin is empty, a closed stderr takes anything, a closed stdout fails when used."""
    # In the order of their numbers: each opens as the lowest one that is free.
    sys.stdin = sys.stdin or _reopened(os.O_RDONLY, "r")
    sys.stdout = sys.stdout or _reopened(os.O_RDONLY, "w")
    sys.stderr = sys.stderr or _reopened(os.O_WRONLY, "w")


def _reopened(flags: int, mode: Literal["r", "w"]) -> TextIO:
    # Children inherit the three, as they do when a shell opens them.
    number = os.open(os.devnull, flags)
    os.set_inheritable(number, True)
    return open(number, mode, encoding="utf-8")


class Output:
    """Stdout that remembers an error of its own: argparse and others pass over it in silence."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        with self._watched():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._watched():
            self._stream.flush()

    def abandon(self) -> None:
        """Python flushes once more at exit: give it somewhere to flush to."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

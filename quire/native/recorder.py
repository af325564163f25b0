"""Recorder: where operations on rows go: onto a tape, or straight into the library.

An operation is written once, in `row_ops.py`, and asks its recorder for memory and addresses. On
tensors it runs at once (`Now`), so a step layer by layer and a step on a tape have the same bits.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.native.library import Library
from quire.native.tape import Op, Rows, Step, Tape


class Recorder(Protocol):
    """`x` is what the operation reads: a tensor [tokens, width], or `Rows`."""

    def made(self, x: Any, width: int) -> Any:
        """Rows for a result, as many as there are of x."""
        ...

    def at(self, x: Any) -> int:
        """The address of rows that follow one another."""
        ...

    def place(self, x: Any) -> tuple[int, int]:
        """The address of rows, and the distance between them."""
        ...

    def keep(self, tensor: Tensor) -> int:
        """The address of a weight."""
        ...

    def record(self, made: ctypes.Structure, *used: object) -> int:
        """The address of a record, which keeps what it points into."""
        ...

    def num_rows(self, x: Any) -> int:
        """The most that there may be of x."""
        ...

    def do(self, kind: int, rows: Any, /, scratch: int = 0, **fields: Any) -> None:
        """The operation on as many rows; `scratch` bytes are its own while it runs."""
        ...


class OnTape:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def made(self, x: Rows, width: int) -> Rows:
        return self.tape.rows(width, x.of_samples)

    def at(self, x: Rows) -> int:
        return self.tape.whole(x)

    def place(self, x: Rows) -> tuple[int, int]:
        return x.place()

    def keep(self, tensor: Tensor) -> int:
        return self.tape.keep(tensor)

    def record(self, made: ctypes.Structure, *used: object) -> int:
        self.tape.kept += [made, used]
        return ctypes.addressof(made)

    def num_rows(self, x: Rows) -> int:
        return self.tape.max_rows

    def do(self, kind: int, rows: Rows, /, scratch: int = 0, **fields: Any) -> None:
        self.tape.needs(scratch)
        self.tape.add(kind, rows.of_samples, **fields)


class Now:
    def __init__(self, library: Library) -> None:
        self.library = library
        self._kept: list[Tensor] = []  # copies made for this operation

    def made(self, x: Tensor, width: int) -> Tensor:
        return torch.empty(len(x), width)

    def at(self, x: Tensor) -> int:
        return self.place(x.contiguous())[0]

    def place(self, x: Tensor) -> tuple[int, int]:
        assert x.dtype == torch.float32, x.dtype
        x = x if x.stride(-1) == 1 else x.contiguous()
        self._kept.append(x)
        return x.data_ptr(), x.stride(0)

    def keep(self, tensor: Tensor) -> int:
        return self.at(tensor)

    def record(self, made: ctypes.Structure, *used: object) -> int:
        return ctypes.addressof(made)  # the caller has it until the operation is done

    def num_rows(self, x: Tensor) -> int:
        return len(x)

    def do(self, kind: int, rows: Tensor, /, scratch: int = 0, **fields: Any) -> None:
        memory = torch.empty(scratch, dtype=torch.uint8)
        op, step = Op(kind=kind, of_samples=False, **fields), Step(num_tokens=len(rows))
        self.library.run(ctypes.addressof(op), 1, step, memory.data_ptr())


def recorder_of(x: object, library: Library) -> Recorder:
    return OnTape(x.tape) if isinstance(x, Rows) else Now(library)

"""Tape: a model's own Python code, recorded once as a list of native operations.

Recording runs the model on `Rows` in place of tensors: each layer adds its operation to the tape,
and nothing is computed. A step then replays the list in one call, for any number of tokens up to
the most a step may have. What has no operation here raises NotRecordable; such a model runs layer
by layer. `attn/native.py` adds the operations of attention.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, NoReturn

import torch
from torch import Tensor

from quire.native.library import Library
from quire.native.panels import Panels

EMBED, NORM, PRODUCT, STORE, ATTEND, GATE, SCALE, PICK, REORDER = range(9)
GATES = {"silu": 0, "gelu": 1, "relu2": 2}
LANES = 16  # widths of rows that operations take are multiples of it


class NotRecordable(Exception):
    """The model does something that no native operation does."""


class Op(ctypes.Structure):
    """`qn_op` of quire_native.h."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "of_samples")),
        *((name, c_void_p) for name in ("x", "y", "out", "sum", "weight", "product", "heads")),
        *((name, c_int32) for name in ("width", "out_stride", "kind_of_gate")),
        ("eps", c_float),
    )


class Step(ctypes.Structure):
    """`qn_step` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "tables")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "rows")),
        *((name, c_void_p) for name in ("sample_index", "sample_rows")),
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "num_samples", "table_stride")),
        ("page_size", c_int32),
    )


class Rows:
    """Rows of floats on a tape: what a tensor [tokens, width] is while a model is recorded.

    Its memory is given back to the tape when the last reference goes, so the tape needs no more of
    it than the model's own code keeps alive.
    """

    dtype = torch.float32

    def __init__(self, tape: Tape, memory: Tensor, width: int, of_samples: bool) -> None:
        self.tape, self.memory, self.width, self.of_samples = tape, memory, width, of_samples

    def __del__(self) -> None:
        self.tape.give_back(self.memory)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(f"rows have no {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise NotRecordable(f"no native operation for {getattr(function, '__name__', function)}")

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def shape(self) -> tuple[int, int]:
        return (-1, self.width)  # any number of rows

    def __mul__(self, factor: object) -> Any:
        if not isinstance(factor, (int, float)):
            raise NotRecordable("rows are multiplied by plain numbers only")
        return self.tape.scale(self, float(factor), None)

    def __add__(self, other: object) -> Any:
        if not isinstance(other, Rows) or other.width != self.width:
            raise NotRecordable("rows are added to rows of their width only")
        return self.tape.scale(self, 1.0, other)

    def _refuse(self, *others: object) -> NoReturn:
        raise NotRecordable("rows are taken whole, and scaled or added, nothing else")

    # Operators are looked up in the class, where __getattr__ does not see them.
    __getitem__ = __len__ = __iter__ = __bool__ = __neg__ = __rmul__ = __radd__ = _refuse
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __matmul__ = __pow__ = _refuse

    def reshape(self, *shape: int) -> Any:
        return self  # heads of a token lie side by side already

    def index_select(self, dim: int, index: object) -> Any:
        return self.tape.pick(self)


class Tape:
    def __init__(self, library: Library, max_rows: int) -> None:
        self.library, self.max_rows = library, max_rows
        self.ops: list[Op] = []
        self.kept: list[object] = []  # what the operations' addresses point into
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._scratch_bytes = 0
        self._array: Any = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    shape = (1,)  # stands in for a step's own indices while a model is recorded

    # ------------------------------------------------------------ memory

    def rows(self, width: int, of_samples: bool) -> Rows:
        if width % LANES:
            raise NotRecordable(f"rows of {width} numbers, want a multiple of {LANES}")
        free = self._free[width]
        memory = free.pop() if free else torch.empty(self.max_rows * width)
        return Rows(self, memory, width, of_samples)

    def give_back(self, memory: Tensor) -> None:
        self._free[memory.numel() // self.max_rows].append(memory)

    def keep(self, tensor: Tensor) -> int:
        """The address of numbers that operations read: fp32, in a row."""
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise NotRecordable(f"got {tensor.dtype} numbers, want contiguous fp32")
        self.kept.append(tensor)
        return tensor.data_ptr()

    # ------------------------------------------------------------ operations

    def add(self, kind: int, of_samples: bool, **fields: Any) -> None:
        self.ops.append(Op(kind=kind, of_samples=of_samples, **fields))

    def embed(self, table: Panels) -> Rows:
        out = self.rows(table.num_in, False)
        at = {"out": out.address, "product": self._weight(table)}
        self.add(EMBED, False, **at, width=out.width, eps=1.0)
        return out

    def norm(self, x: Rows, residual: Rows | None, weight: Tensor, eps: float) -> tuple[Rows, Rows]:
        """(normed, what was normed): x, or the sum of x and the residual."""
        out = self.rows(x.width, x.of_samples)
        total = x if residual is None else self.rows(x.width, x.of_samples)
        self.add(
            NORM,
            x.of_samples,
            x=x.address,
            y=None if residual is None else residual.address,
            out=out.address,
            sum=None if residual is None else total.address,
            weight=self.keep(weight),
            width=x.width,
            eps=eps,
        )
        return out, total

    def product(self, x: Rows, parts: tuple[Panels, ...]) -> Rows:
        num_out = sum(part.num_out for part in parts)
        out, column = self.rows(num_out, x.of_samples), 0
        for part in parts:
            needed = self.library.scratch_bytes(part.weight, self.max_rows)
            self._scratch_bytes = max(self._scratch_bytes, needed)
            source = x if part.order is None else self.reorder(x, part)
            self.add(
                PRODUCT,
                x.of_samples,
                x=source.address,
                out=out.address + 4 * column,
                product=self._weight(part),
                width=x.width,
                out_stride=num_out,
            )
            column += part.num_out
        return out

    def reorder(self, x: Rows, panels: Panels) -> Rows:
        """Rows in the order of the weight's columns."""
        out = self.rows(x.width, x.of_samples)
        at = {"x": x.address, "out": out.address, "product": self._weight(panels)}
        self.add(REORDER, x.of_samples, **at, width=x.width)
        return out

    def _weight(self, panels: Panels) -> int:
        self.kept.append(panels)
        return ctypes.addressof(panels.weight)

    def gate(self, x: Rows, activation: str) -> Rows:
        out = self.rows(x.width // 2, x.of_samples)
        kind = GATES[activation]
        at = {"x": x.address, "out": out.address}
        self.add(GATE, x.of_samples, **at, width=out.width, kind_of_gate=kind)
        return out

    def scale(self, x: Rows, factor: float, added: Rows | None) -> Rows:
        out = self.rows(x.width, x.of_samples)
        y = None if added is None else added.address
        at = {"x": x.address, "y": y, "out": out.address}
        self.add(SCALE, x.of_samples, **at, width=x.width, eps=factor)
        return out

    def pick(self, x: Rows) -> Rows:
        """The rows that are read at the end, of all tokens'."""
        out = self.rows(x.width, True)
        self.add(PICK, True, x=x.address, out=out.address, width=x.width)
        return out

    # ------------------------------------------------------------ replay

    def end(self) -> None:
        """Recording is over."""
        self._array = (Op * len(self.ops))(*self.ops)
        self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8)

    def replay(self, step: Step) -> None:
        scratch = self._scratch.data_ptr()
        self.library.run(ctypes.addressof(self._array), len(self.ops), step, scratch)

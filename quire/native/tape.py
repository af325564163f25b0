"""Tape: a model's own Python code, recorded once as a list of native operations.

Recording runs the model on `Rows` in place of tensors: each layer adds its operation to the tape,
and nothing is computed. A step then replays the list in one call, for any number of tokens up to
the most a step may have. Where ranks talk to each other, the list pauses. What has no operation
here raises NotRecordable; such a model runs layer by layer. `ops/native_rows.py` has what lies
between products, `attn/native.py` attention.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from quire.dist.homes import StepHomes
from quire.native.library import Library
from quire.native.panels import Panels
from quire.native.urge import GivenUp

EMBED, NORM, PRODUCT, STORE, ATTEND, GATE, SCALE, PICK = range(8)
ACTIVATE, POSITIONS, ROUND, ROUTE, EXPERTS, ADD_GATED, HEADS = range(8, 15)
STORE_LATENTS, ATTEND_LATENTS, REORDER, ADAPT = 15, 16, 17, 18
LANES = 16  # rows begin at multiples of it, and most operations take such widths only


class NotRecordable(Exception):
    """The model does something that no native operation does."""


class Op(ctypes.Structure):
    """`qn_op` of quire_native.h."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "of_samples")),
        *((name, c_void_p) for name in ("x", "y", "out", "sum", "weight", "product", "heads")),
        *((name, c_int32) for name in ("width", "out_stride", "kind_of_gate")),
        ("eps", c_float),
        ("bias", c_void_p),
        ("x_stride", c_int32),
        ("limit", c_float),
        ("more", c_void_p),
    )


class Step(ctypes.Structure):
    """`qn_step` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("ids", "positions", "slots", "tables")),
        *((name, c_void_p) for name in ("query_starts", "context_lens", "rows")),
        *((name, c_void_p) for name in ("sample_index", "sample_rows")),
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "num_samples", "table_stride")),
        ("page_size", c_int32),
        *((name, c_void_p) for name in ("adapters", "sample_adapters", "paths")),
        ("path_stride", c_int64),
        ("stop", c_void_p),
    )


class Rows:
    """Rows of floats on a tape: what a tensor [tokens, width] is while a model is recorded.

    Its memory is given back to the tape when the last reference goes, so the tape needs no more of
    it than the model's own code keeps alive. Some neighbouring columns of rows are `Rows` too.
    """

    dtype = torch.float32

    def __init__(
        self,
        tape: Tape,
        memory: Tensor,
        width: int,
        of_samples: bool,
        within: Rows | None = None,
        column: int = 0,
    ) -> None:
        """`within`: these are its columns from `column` on."""
        self.tape, self.memory, self.width, self.of_samples = tape, memory, width, of_samples
        self.within, self.column = within, column
        self.is_own: bool = tape.is_own if within is None else within.is_own

    def __del__(self) -> None:
        if self.within is None:
            self.tape.give_back(self.memory)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotRecordable(f"rows have no {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.cat and len(args) == 2 and args[1] == 1:
            first, *others = args[0]
            return first.between(_side_by_side, sum(x.width for x in args[0]), *others)
        raise NotRecordable(f"no native operation for {getattr(function, '__name__', function)}")

    @property
    def address(self) -> int:
        return self.memory.data_ptr() + 4 * self.column

    def place(self) -> tuple[int, int]:
        """Where the rows begin, and the distance between them."""
        return self.address, self.row_stride

    @property
    def row_stride(self) -> int:
        """Numbers from a row to the next."""
        return self.memory.numel() // self.tape.max_rows

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

    def __getitem__(self, index: object) -> Any:
        """Columns: rows[:, begin:end]."""
        match index:
            case (slice(start=None, stop=None, step=None), slice(step=None) as columns):
                begin, end, _ = columns.indices(self.width)
                return self._columns(begin, end - begin)
        raise NotRecordable("rows are cut into columns only")

    def split(self, widths: list[int], dim: int) -> Any:
        assert dim == 1 and sum(widths) == self.width, (widths, dim)
        begins = [sum(widths[:i]) for i in range(len(widths))]
        return tuple(map(self._columns, begins, widths))

    def _columns(self, begin: int, width: int) -> Rows:
        whole = self.within or self
        at = self.column + begin
        return Rows(self.tape, self.memory, width, self.of_samples, whole, at)

    def _refuse(self, *others: object) -> NoReturn:
        raise NotRecordable("rows are taken whole, and scaled or added, nothing else")

    # Operators are looked up in the class, where __getattr__ does not see them.
    __len__ = __iter__ = __bool__ = __neg__ = __rmul__ = __radd__ = _refuse
    __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __matmul__ = __pow__ = _refuse

    def reshape(self, *shape: int) -> Any:
        return self  # heads of a token lie side by side already

    def flatten(self, dim: int) -> Any:
        return self

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> Any:
        return self

    def index_select(self, dim: int, index: object) -> Any:
        return self.tape.pick(self)

    def between(self, make: Callable[..., Tensor], width: int, *others: Any) -> Any:
        """Rows that Python makes of these and others in every step (`dist/ranks.py`)."""
        return self.tape.pause(make, width, (self, *others))


def _side_by_side(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


class Positions(NamedTuple):
    """Stands in for the positions of a step's tokens."""

    tape: Tape


class Columns(NamedTuple):
    """Where rows lie. Holds no `Rows`, whose memory is another's once the model lets go of them."""

    memory: Tensor  # [rows, stride]
    begin: int
    width: int

    def of(self, num_rows: int) -> Tensor:
        return self.memory[:num_rows, self.begin : self.begin + self.width]


class Pause(NamedTuple):
    """A place where Python does something between two operations."""

    before: int  # this operation
    of_samples: bool
    go: Callable[[int], None]  # for so many rows
    is_own: bool  # these are of this rank's requests alone


class Run(NamedTuple):
    """Operations in between, one behind the other."""

    begin: int
    end: int
    is_own: bool


class OwnStep(NamedTuple):
    """This rank's part of a step, where ranks attend rows of their own."""

    step: Step
    tokens: StepHomes
    samples: StepHomes


class Tape:
    def __init__(self, library: Library, max_rows: int) -> None:
        self.library, self.max_rows = library, max_rows
        self.ops: list[Op] = []
        self.kept: list[object] = []  # what the operations' addresses point into
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._scratch_bytes = 0
        self._array: Any = None
        self._pauses: list[Pause] = []
        self._parts: list[Run | Pause] = []
        self.is_own = False  # what is recorded now is of rows of this rank's requests alone
        self._are_own: list[bool] = []  # the same, of each operation
        self.own: OwnStep | None = None  # of the step that is replayed
        self._ids = torch.empty(0, dtype=torch.int64)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    shape = (1,)  # stands in for a step's own indices while a model is recorded

    # ------------------------------------------------------------ memory

    def rows(self, width: int, of_samples: bool) -> Rows:
        stride = width + -width % LANES
        free = self._free[stride]
        memory = free.pop() if free else torch.empty(self.max_rows * stride)
        return Rows(self, memory, width, of_samples)

    def whole(self, x: Rows) -> int:
        """The address of rows that follow one another and have a width for most operations."""
        if x.row_stride != x.width:
            raise NotRecordable(f"rows of {x.width} numbers, want a multiple of {LANES}")
        return x.address

    def needs(self, scratch: int) -> None:
        """An operation uses so many bytes while it runs."""
        self._scratch_bytes = max(self._scratch_bytes, scratch)

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
        self._are_own.append(self.is_own)

    def embed(self, table: Panels) -> Rows:
        out = self.rows(table.num_in, False)
        at = {"out": self.whole(out), "product": self._weight(table)}
        self.add(EMBED, False, **at, width=out.width, eps=1.0)
        return out

    def product(self, x: Rows, parts: tuple[Panels, ...]) -> Rows:
        num_out = sum(part.num_out for part in parts)
        out, column = self.rows(num_out, x.of_samples), 0
        for part in parts:
            self.needs(self.library.scratch_bytes(part.weight, self.max_rows))
            source = x if part.order is None else self.reorder(x, part)
            self.add(
                PRODUCT,
                x.of_samples,
                x=source.address,
                out=out.address + 4 * column,
                product=self._weight(part),
                width=x.row_stride,
                out_stride=out.row_stride,
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

    def scale(self, x: Rows, factor: float, added: Rows | None) -> Rows:
        out = self.rows(x.width, x.of_samples)
        y = None if added is None else self.whole(added)
        at = {"x": self.whole(x), "y": y, "out": out.address}
        self.add(SCALE, x.of_samples, **at, width=x.width, eps=factor)
        return out

    def pick(self, x: Rows) -> Rows:
        """The rows that are read at the end, of all tokens'."""
        now, self.is_own = self.is_own, x.is_own
        out = self.rows(x.width, True)
        self.add(PICK, True, x=self.whole(x), out=out.address, width=x.width)
        self.is_own = now
        return out

    # ------------------------------------------------------------ pauses

    def pause(self, make: Callable[..., Tensor], width: int, inputs: Sequence[Rows]) -> Rows:
        """Rows that Python makes of others in every step; `make` gets and gives tensors."""
        sources = [Columns(x.memory.view(self.max_rows, -1), x.column, x.width) for x in inputs]
        out = self.rows(width, inputs[0].of_samples)
        into = Columns(out.memory.view(self.max_rows, -1), 0, width)

        def go(num_rows: int) -> None:
            made = make(*(source.of(num_rows) for source in sources))
            into.of(len(made)).copy_(made)

        self._pauses.append(Pause(len(self.ops), out.of_samples, go, inputs[0].is_own))
        return out

    def look_up(self, make: Callable[[Tensor], Tensor], width: int) -> Rows:
        """The same of the ids of a step's tokens."""
        out = self.rows(width, False)
        into = Columns(out.memory.view(self.max_rows, -1), 0, width)

        def go(num_rows: int) -> None:
            into.of(num_rows).copy_(make(self._ids))

        self._pauses.append(Pause(len(self.ops), False, go, self.is_own))
        return out

    @property
    def num_pauses(self) -> int:
        return len(self._pauses)

    # ------------------------------------------------------------ replay

    def end(self) -> None:
        """Recording is over."""
        self._array = (Op * len(self.ops))(*self.ops)
        self._scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8)
        done = 0
        for pause in self._pauses:
            self._parts += [*self._runs(done, pause.before), pause]
            done = pause.before
        self._parts += self._runs(done, len(self.ops))

    def _runs(self, begin: int, end: int) -> Iterator[Run]:
        """These operations, cut where others' rows follow own rows or the other way round."""
        for is_own, run in groupby(range(begin, end), self._are_own.__getitem__):
            numbers = list(run)
            yield Run(numbers[0], numbers[-1] + 1, is_own)

    def replay(self, step: Step, ids: Tensor | None = None, own: OwnStep | None = None) -> None:
        """`ids`: of the step's tokens, for whoever looks them up in a pause. `own`: what of the
        step is ours, where that is not all of it. Raises GivenUp."""
        scratch, first = self._scratch.data_ptr(), ctypes.addressof(self._array)
        self._ids, self.own = self._ids if ids is None else ids, own
        for part in self._parts:
            of = step if own is None or not part.is_own else own.step
            if isinstance(part, Pause):
                part.go(int(of.num_samples if part.of_samples else of.num_tokens))
            elif of.num_tokens:
                at = first + part.begin * ctypes.sizeof(Op)
                if not self.library.run(at, part.end - part.begin, of, scratch):
                    raise GivenUp

"""AdapterTable: what each adapter adds to one product, as the native library reads it by slot.

An adapter that comes or goes changes a cell of each table; a recorded step needs no other change.
`src/adapt.c` is the other side.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import Any, NamedTuple

from quire.native.panels import Panels
from quire.native.tape import ADAPT, Rows


class LowPart(ctypes.Structure):
    """`qn_low_part` of quire_native.h."""

    _fields_ = (
        ("expand", c_void_p),
        *((name, c_int32) for name in ("column", "input")),
        ("scale", c_float),
    )


class LowRank(ctypes.Structure):
    """`qn_low_rank`."""

    _fields_ = (*((name, c_void_p) for name in ("shrink", "parts")), ("num_parts", c_int32))


class Adapters(ctypes.Structure):
    """`qn_adapters`."""

    _fields_ = (("slots", c_void_p), *((name, c_int32) for name in ("width", "most_parts")))


class Expand(NamedTuple):
    """B of one part, its first column, its first input, and its scale."""

    panels: Panels
    column: int
    input: int
    scale: float


class AdapterTable:
    def __init__(self, num_slots: int, max_width: int, max_parts: int) -> None:
        """Slots from 1 on; `max_width`: of what all A's of an adapter give."""
        self._cells = (c_void_p * (num_slots + 1))()
        self._kept: dict[int, object] = {}
        self.max_width = max_width
        self._table = Adapters(ctypes.addressof(self._cells), max_width, max_parts)

    def put(self, slot: int, shrink: Panels, parts: Sequence[Expand]) -> None:
        """Not while a step runs; nor is `drop`."""
        assert shrink.num_out <= self.max_width, (shrink.num_out, self.max_width)
        made: Any = (LowPart * len(parts))(
            *(LowPart(ctypes.addressof(p.panels.weight), *p[1:]) for p in parts)
        )
        record = LowRank(ctypes.addressof(shrink.weight), ctypes.addressof(made), len(parts))
        self._kept[slot] = (record, made, shrink, parts)
        self._cells[slot] = ctypes.addressof(record)

    def drop(self, slot: int) -> None:
        self._cells[slot] = None
        self._kept.pop(slot, None)

    def record(self, x: Rows, y: Rows) -> None:
        """Add to the product y of x, on their tape."""
        tape = x.tape
        tape.needs(4 * tape.max_rows * (self.max_width + y.row_stride))
        tape.kept.append(self)
        at = {"x": x.address, "out": y.address, "more": ctypes.addressof(self._table)}
        tape.add(ADAPT, x.of_samples, **at, x_stride=x.row_stride, out_stride=y.row_stride)

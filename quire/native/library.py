"""The native library as Python sees it: loaded once, called through ctypes without the GIL.

`find_library` compiles it if need be, chooses the best instruction set this CPU has (or the one
QUIRE_CPU_ISA names), and multiplies once with it and with plain C: the results must agree to the
last bit, or the next best is taken.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

from quire import env
from quire.errors import NotSupported
from quire.native.build import ensure_built


class Matrix(ctypes.Structure):
    """`qn_weight` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "offsets", "zeros")),
        *((name, c_void_p) for name in ("super_scales", "super_offsets", "bias", "table", "order")),
        *((name, c_int32) for name in ("num_out", "num_in", "bits", "block", "zero")),
        *((name, c_int32) for name in ("scale_kind", "super_size", "share", "planes")),
    )


class Library:
    """Bindings, and the pool of threads that products are dealt out to."""

    def __init__(self, path: Path) -> None:
        self._c = _bind(ctypes.CDLL(str(path)))
        self.isas = tuple(self._isa_names())  # what this CPU can run, best first
        self.isa = self.isas[-1]
        self._pools: dict[int, int] = {}  # by number of threads; none ever goes: it may be in use
        self._pool: int | None = None
        self._scribe: int | None = None

    def _isa_names(self) -> list[str]:
        names: list[str] = []
        while (name := self._c.qn_isa_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def use_isa(self, name: str) -> None:
        if self._c.qn_use_isa(name.encode()):
            raise NotSupported(
                f"got QUIRE_CPU_ISA={name!r}, this CPU has {', '.join(self.isas)}; take one of"
                " them, torch for none, or leave it out for the best"
            )
        self.isa = name

    def set_threads(self, count: int) -> None:
        if count not in self._pools:
            self._pools[count] = self._c.qn_pool_new(count)
        self._pool = self._pools[count]

    def can_multiply(self, weight: Matrix) -> bool:
        return bool(self._c.qn_can_multiply(byref(weight)))

    def rows(self, weight: Matrix, ids: int, count: int, out: int) -> None:
        """Rows of the weight itself, as floats one after the other."""
        self._c.qn_rows(byref(weight), ids, count, out)

    def scratch_bytes(self, weight: Matrix, num_rows: int) -> int:
        return int(self._c.qn_scratch_bytes(byref(weight), num_rows))

    def experts_bytes(self, experts: ctypes.Structure, num_rows: int) -> int:
        """Scratch memory of a layer of experts."""
        return int(self._c.qn_experts_bytes(byref(experts), num_rows))

    def product(
        self,
        weight: Matrix,
        x: tuple[int, int],
        num_rows: int,
        out: tuple[int, int],
        scratch: int,
    ) -> None:
        """`x` and `out` are addresses of float rows and the distance between rows."""
        self._c.qn_product(self._pool, byref(weight), *x, num_rows, *out, scratch)

    def put(
        self, exchange: ctypes.Structure, turn: int, rows: int, count: int, size: int, stride: int
    ) -> None:
        """See `exchange.py`; sizes and strides in bytes."""
        self._c.qn_put(byref(exchange), turn, rows, count, size, stride)

    def take(self, exchange: ctypes.Structure, turn: int, rank: int, *place: float) -> bool:
        """`place`: address, rows, bytes of a row, bytes between rows, seconds to wait."""
        return bool(self._c.qn_take(byref(exchange), turn, rank, *place))

    def can_seal(self) -> bool:
        return bool(self._c.qn_can_seal())

    def scribe(self) -> int | None:
        """A thread of the lowest priority, one for all; None: there can be none."""
        if self._scribe is None:
            self._scribe = self._c.qn_scribe_new()
        return self._scribe

    def seal(self, scribe: int | None, pads: bytes, pieces: int, each: int, count: int) -> bytes:
        """See `scribe.py`; `pieces` is an address, `each` how many of them are a record."""
        out = ctypes.create_string_buffer(32 * count)
        self._c.qn_seal(scribe, pads, pieces, each, count, out)
        return out.raw

    def write(self, scribe: int | None, fd: int, pieces: int, count: int) -> int:
        """Bytes written, or minus the number of the error."""
        return int(self._c.qn_write(scribe, fd, pieces, count))

    def run(self, ops: int, num_ops: int, step: ctypes.Structure, scratch: int) -> bool:
        """Operations at that address, one after the other; see `tape.py`. False: given up."""
        return not self._c.qn_run(self._pool, ops, num_ops, byref(step), scratch)


def _bind(c: ctypes.CDLL) -> ctypes.CDLL:
    weight = POINTER(Matrix)
    signatures: dict[str, tuple[object, list[object]]] = {
        "qn_pool_new": (c_void_p, [c_int]),
        "qn_isa_name": (c_char_p, [c_int]),
        "qn_use_isa": (c_int, [c_char_p]),
        "qn_can_multiply": (c_int, [weight]),
        "qn_scratch_bytes": (c_int64, [weight, c_int64]),
        "qn_experts_bytes": (c_int64, [c_void_p, c_int64]),
        "qn_run": (c_int, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
        "qn_put": (None, [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64]),
        "qn_take": (
            c_int,
            [c_void_p, c_int64, c_int, c_void_p, c_int64, c_int64, c_int64, c_double],
        ),
        "qn_can_seal": (c_int, []),
        "qn_scribe_new": (c_void_p, []),
        "qn_seal": (c_int, [c_void_p, c_char_p, c_void_p, c_int64, c_int64, c_char_p]),
        "qn_write": (c_int64, [c_void_p, c_int, c_void_p, c_int64]),
        "qn_rows": (None, [weight, c_void_p, c_int64, c_void_p]),
        "qn_product": (
            None,
            [c_void_p, weight, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    return c


class Found(NamedTuple):
    library: Library | None
    reason: str  # which instruction set, or why there is no library


@cache
def find_library() -> Found:
    """The library, one for the process, or why there is none. Raises NotSupported where
    QUIRE_CPU_ISA names what this CPU has not: whoever asks for one does not want another."""
    if env.cpu_isa() == "torch":
        return Found(None, "QUIRE_CPU_ISA=torch: no native library")
    try:
        library = open_library()
    except NotSupported as error:
        return Found(None, str(error))
    _choose_isa(library)
    return Found(library, f"the best of {', '.join(library.isas)} on this CPU")


def open_library() -> Library:
    """With plain C. Raises NotSupported where there can be none."""
    try:
        library = Library(ensure_built())
    except OSError as error:
        raise NotSupported(f"the native library cannot be loaded: {error}") from None
    library.set_threads(1)  # until an engine asks for more
    return library


def _choose_isa(library: Library) -> None:
    if asked := env.cpu_isa():
        library.use_isa(asked)
        return
    from quire.native.check import agrees_with_plain  # which multiplies, with this very library

    for isa in library.isas:
        library.use_isa(isa)
        if agrees_with_plain(library, isa):
            break

"""StreamForm: what a streaming kernel of packed weights is compiled for, as plain data.

A kernel keeps all numbers beside the codes of its rows in shared memory, words of scales first. So
a form says where in these words the others begin. `slabs.py` says what the names mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from quire.kernels.slabs import Slabs
from quire.kernels.stream_packed_configs import is_short, numbers_of_word
from quire.kernels.stream_unpack_wide import first_text

__all__ = ["StreamForm"]


@dataclass(frozen=True, slots=True)
class StreamForm:
    """Kernels read the attributes, and Triton tells forms apart by their text."""

    kind: str
    low: int  # bits of the planes of codes
    high: int
    group: int
    scales: str
    offsets: str
    super_size: int
    zero: int
    zeros: str
    per: int  # scales of a word
    supers_at: int  # rows of words before them
    offsets_at: int
    zeros_at: int
    count: int  # rows of words
    fields: int  # of a slab
    low_tiles: int  # of a slab: rows of bytes of each plane
    high_tiles: int
    text: int  # first of its texts in `stream_unpack_wide.py`, where codes are whole numbers
    short: bool  # codes need no fp32 on their way: see `stream_unpack.py`

    @classmethod
    def of(cls, slabs: Slabs) -> StreamForm:
        form = slabs.form
        text = first_text(form.low, form.high) if form.kind == "int" else 0
        parts = (slabs.scales, slabs.supers, slabs.offsets, slabs.zeros)
        sizes = (0 if t is None else len(t) for t in parts)
        supers_at, offsets_at, zeros_at, count = accumulate(sizes)
        return cls(
            form.kind, form.low, form.high, form.group or slabs.shape[1],
            form.scales, form.offsets, form.super_size, form.zero, form.zeros,
            numbers_of_word(form),
            supers_at, offsets_at, zeros_at, count, form.fields, form.low * form.fields // 8,
            form.high * form.fields // 8, text, is_short(form),
        )  # fmt: skip

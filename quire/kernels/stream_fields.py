"""A field of a packed weight as floats, in the registers that a thread of a streaming kernel has.

The numbers beside codes are `StreamForm`'s words, which lie in shared memory for all rows of a
program. `stream_unpack.py` and `stream_unpack_wide.py` have the arithmetic.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.stream_packed_configs import FIELD
from quire.kernels.stream_unpack import code_pairs, power_pairs
from quire.kernels.stream_unpack_wide import float_pairs, int_pairs, lane_value, table_pairs
from quire.kernels.unpack_scales import decoded

__all__ = ["field_of", "own_value"]

_WIDTH = gl.constexpr(FIELD)
_ABOVE = gl.constexpr(8388608.0)  # 2**23: its low bits are a code


@gluon.jit
def own_value(table, FORM: gl.constexpr):
    """What `field_of` is given of a table; other forms have none."""
    KIND: gl.constexpr = FORM.kind
    return lane_value(table) if KIND == "table" else 0.0


@gluon.jit
def _bits(kept, first, group, PER: gl.constexpr, layout: gl.constexpr):
    """Of a group's number, for all rows; words of such numbers begin at `first`."""
    word = kept.index(first + group // PER).load(layout)
    if PER > 1:
        WIDE: gl.constexpr = 32 // PER
        word = (word >> (group % PER * WIDE)) & ((1 << WIDE) - 1)
    return word


@gluon.jit
def _super_word(kept, group, FORM: gl.constexpr, layout: gl.constexpr):
    return kept.index(FORM.supers_at + group // FORM.super_size).load(layout)


@gluon.jit
def _scale(kept, group, FORM: gl.constexpr, layout: gl.constexpr):
    SCALES: gl.constexpr = FORM.scales
    OFFSETS: gl.constexpr = FORM.offsets
    PAIRED: gl.constexpr = OFFSETS == "f16" or FORM.zeros == "u16"
    bits = _bits(kept, 0, group, FORM.per, layout)
    scale = decoded(bits & 0xFFFF if PAIRED else bits, SCALES)
    if FORM.super_size > 0:
        word = _super_word(kept, group, FORM, layout)
        if OFFSETS == "":
            scale *= decoded(word, "f32")
        else:
            scale *= decoded(word & 0xFFFF, "f16")
    return scale


@gluon.jit
def _offset(kept, group, FORM: gl.constexpr, layout: gl.constexpr):
    OFFSETS: gl.constexpr = FORM.offsets
    if OFFSETS == "f16":
        offset = decoded((_bits(kept, 0, group, 1, layout) >> 16) & 0xFFFF, "f16")
    else:
        offset = decoded(_bits(kept, FORM.offsets_at, group, 4, layout), "u8")
        if FORM.super_size > 0:
            word = _super_word(kept, group, FORM, layout)
            offset *= decoded((word >> 16) & 0xFFFF, "f16")
    return offset


@gluon.jit
def _zero(kept, group, FORM: gl.constexpr, layout: gl.constexpr):
    """With what else is subtracted from the float that a code becomes."""
    ZEROS: gl.constexpr = FORM.zeros
    MORE: gl.constexpr = _ABOVE + (128.0 if FORM.low == 8 else 0.0)
    if ZEROS == "u16":
        zero = MORE + decoded((_bits(kept, 0, group, 1, layout) >> 16) & 0xFFFF, "u16")
    else:
        zero = MORE + decoded(_bits(kept, FORM.zeros_at, group, 4, layout), ZEROS)
    return zero


@gluon.jit
def _one(kept, group, WHAT: gl.constexpr, FORM: gl.constexpr, layout: gl.constexpr):
    if WHAT == "bits":
        number = _bits(kept, 0, group, FORM.per, layout)
    elif WHAT == "scale":
        number = _scale(kept, group, FORM, layout)
    elif WHAT == "offset":
        number = _offset(kept, group, FORM, layout)
    else:
        number = _zero(kept, group, FORM, layout)
    return number


@gluon.jit
def _spread(kept, group, WHAT: gl.constexpr, FORM: gl.constexpr, SPANS: gl.constexpr, codes):
    """A number of each group of the field from `group` on, for every code."""
    layout: gl.constexpr = codes.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    number = _one(kept, group, WHAT, FORM, of_rows)[:, None]
    spot = gl.arange(0, _WIDTH, gl.SliceLayout(0, layout))[None, :] // 4 % 4  # which 16 inputs
    for i in gl.static_range(1, SPANS):
        more = _one(kept, group + i, WHAT, FORM, of_rows)[:, None]
        number = gl.where(spot >= i * (FORM.group // 16), more, number)
    number, codes = gl.broadcast(number, codes)
    return number


@gluon.jit
def _short_field(
    low, kept, group, F: gl.constexpr, FORM: gl.constexpr, SPANS: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    KIND: gl.constexpr = FORM.kind
    ZEROS: gl.constexpr = FORM.zeros
    SCALES: gl.constexpr = FORM.scales
    bits = _spread(kept, group, "bits", FORM, SPANS, low)
    if KIND == "e2m1":
        weight = power_pairs(low, decoded(bits, "power"), F)
    else:
        scale = decoded(bits & 0xFFFF, SCALES)
        HAS_ZEROS: gl.constexpr = ZEROS == "u16"
        zero = ((bits >> 16) & 0xFFFF).to(gl.float32) if HAS_ZEROS else bits * 0.0 + FORM.zero
        weight = code_pairs(low, zero, scale, F, dtype, SCALES)
    return weight


@gluon.jit
def _wide_field(
    low, high, own, kept, group, F: gl.constexpr, FORM: gl.constexpr, SPANS: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    KIND: gl.constexpr = FORM.kind
    scale = _spread(kept, group, "scale", FORM, SPANS, low)
    if KIND == "table":
        weight = table_pairs(low, own, scale, F, dtype)
    elif KIND == "e4m3":
        weight = float_pairs(low, scale, dtype)
    else:
        HAS_OFFSET: gl.constexpr = FORM.offsets != ""
        HAS_ZEROS: gl.constexpr = FORM.zeros != ""
        MORE: gl.constexpr = _ABOVE + FORM.zero + (128.0 if FORM.low == 8 else 0.0)
        zero = _spread(kept, group, "zero", FORM, SPANS, low) if HAS_ZEROS else scale * 0.0 + MORE
        offset = _spread(kept, group, "offset", FORM, SPANS, low) if HAS_OFFSET else scale
        weight = int_pairs(low, high, zero, scale, offset, FORM.text + 4 * F, HAS_OFFSET, dtype)
    return weight


@gluon.jit
def field_of(
    w_flat, lanes: gl.constexpr, own, kept, step, stage, at: gl.constexpr,
    FIELDS: gl.constexpr, FORM: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The field at a place of a step, in the order of the codes. `own`: see `own_value`."""
    F: gl.constexpr = at % FORM.fields  # of its slab
    slab = stage * (FIELDS // FORM.fields) + at // FORM.fields
    low = w_flat[0].index(slab * FORM.low_tiles + F // (8 // FORM.low)).load(lanes)
    high = low
    if FORM.high > 0:
        high = w_flat[1].index(slab * FORM.high_tiles + F // (8 // FORM.high)).load(lanes)
    GROUP: gl.constexpr = FORM.group
    SPANS: gl.constexpr = 1 if GROUP >= _WIDTH else _WIDTH // GROUP  # groups of a field
    if GROUP > _WIDTH:  # of whole pairs of fields, which then have the same words
        group = (step * (FIELDS // 2) + at // 2) // (GROUP // (2 * _WIDTH))
    else:
        group = (step * FIELDS + at) * SPANS
    if FORM.short:
        weight = _short_field(low, kept, group, F, FORM, SPANS, dtype)
    else:
        weight = _wide_field(low, high, own, kept, group, F, FORM, SPANS, dtype)
    return weight

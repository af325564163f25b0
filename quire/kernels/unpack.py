"""One field of a packed weight as floats: the step that tells one form from another.

    weight = dtype(value(code) * scale + offset), value and products in fp32

just as the form's own `dequantize` has it, so whatever multiplies with these numbers has the bits
of a product with the expanded weight. A product that an offset is added to is exact, so it does not
matter whether a machine rounds it. `packed_kernel.py` multiplies, `expand.py` stores the numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.unpack_codes import code_field, table_value
from quire.kernels.unpack_e2m1 import e2m1_pairs, power_factor
from quire.kernels.unpack_scales import decoded, part_of, six_bits, word_of
from quire.kernels.unpack_sparse import sparse_field, sparse_lanes

__all__ = ["in_order", "weight_field"]


@triton.jit
def in_order(tile, KIND: tl.constexpr, LANES: tl.constexpr):
    """[rows, WIDTH] of a field, from `weight_field`, in the order of its inputs: see
    `slabs.in_lanes`."""
    if LANES and KIND != "2:4":
        parts = tl.reshape(tile, [tile.shape[0], 4, 4, 2, 2])  # rows, t, j, p, c
        tile = tl.reshape(tl.permute(parts, [0, 2, 4, 1, 3]), [tile.shape[0], 64])
    return tile


@triton.jit
def _column_of(place, LANES: tl.constexpr):
    """The input of a field whose code is at a place of it: see `slabs.in_lanes`."""
    column = place
    if LANES:
        thread, sixteen, byte = place // 16, place // 4 % 4, place % 4
        column = sixteen * 16 + byte % 2 * 8 + thread * 2 + byte // 2
    return column


@triton.jit
def _number(
    words, base, at, row, num_rows, KIND: tl.constexpr, STEP_GROUPS: tl.constexpr
):  # fmt: skip
    """The fp32 number of group base + at, from words of neighbouring groups; or its bits as they
    are, four groups to a word."""
    PER: tl.constexpr = 1 if KIND == "f32" else 2 if KIND == "f16" or KIND == "bf16" else 4
    STATIC: tl.constexpr = STEP_GROUPS > 0 and STEP_GROUPS % (16 if KIND == "s6" else PER) == 0
    if KIND == "s6":
        number = six_bits(words, base, at, row, num_rows, STATIC)
    else:
        word = word_of(words, base, at, row, num_rows, PER, STATIC)
        number = decoded(part_of(word, base, at, PER, STATIC), KIND)
    return number


@triton.jit
def _two_numbers(
    words, base, at, row, num_rows,
    SCALES: tl.constexpr, BESIDE: tl.constexpr, STEP_GROUPS: tl.constexpr,
):  # fmt: skip
    """A group's scale and what shares its word; without that, the scale twice."""
    if BESIDE == "":
        scale = _number(words, base, at, row, num_rows, SCALES, STEP_GROUPS)
        beside = scale
    elif BESIDE == "u4":
        both = _number(words, base, at, row, num_rows, "whole", STEP_GROUPS)
        scale, beside = decoded(both & 15, "u4"), decoded(both >> 4, "u4")
    else:
        word = word_of(words, base, at, row, num_rows, 1, False)
        scale = decoded(word & 0xFFFF, SCALES)
        beside = decoded((word >> 16) & 0xFFFF, BESIDE)
    return scale, beside


@triton.jit
def _value(
    tiles, table, rows, spots, f: tl.constexpr, N,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """What codes stand for, in fp32; whole numbers, 2**23 more."""
    if KIND == "e4m3":
        value = tl.load(tiles + spots).to(tl.float16).to(tl.float32)
    elif KIND == "e5m2":  # the high half of fp16
        half = tl.load(tiles + spots).to(tl.int16) << 8
        value = half.to(tl.float16, bitcast=True).to(tl.float32)
    elif LOW == 8:  # signed
        value = tl.load(tiles + spots).to(tl.float32)
    else:
        q = code_field(tiles, f, N, spots, WIDTH, LOW, HIGH)
        if KIND == "table" or KIND == "tables":
            value = table_value(table, q, rows, KIND, PLAIN)
        elif KIND == "e2m1":  # doubled: two bits of exponent and one below, moved into their places
            bits = ((q & 8) << 28) | ((q & 7) << 22)
            value = bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2**127
        else:  # its low bits: cheaper than a conversion, as zeros are subtracted anyway
            value = (q | 0x4B000000).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _quotient(number, divisor, reciprocal):
    """number / divisor, rounded once: exactly for numbers of four bits, whatever the divisor (all
    significands were tried), where nothing is near the end of fp32's range."""
    near = number * reciprocal
    return tl.math.fma(tl.math.fma(-divisor, near, number), reciprocal, near)


@triton.jit
def _with_scales(
    value, tensors, base, at, row, num_scale_rows,
    KIND: tl.constexpr, LOW: tl.constexpr, SCALES: tl.constexpr, OFFSETS: tl.constexpr,
    SUPER: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr, STEP_GROUPS: tl.constexpr,
):  # fmt: skip
    """(value - zero) * scale + offset, of group base + at."""
    _, scales, supers, offsets, zeros = tensors
    BESIDE: tl.constexpr = OFFSETS == "f16" or OFFSETS == "u4"
    IN_WORD: tl.constexpr = OFFSETS if BESIDE else ZEROS if ZEROS == "u16" else ""
    scale, beside = _two_numbers(
        scales, base, at, row, num_scale_rows, SCALES, IN_WORD, STEP_GROUPS
    )
    MORE: tl.constexpr = 8388608.0 if KIND == "int" and LOW < 8 else 0.0
    if ZEROS == "u16":
        value = value - (MORE + beside)
    elif ZEROS != "":
        zero = _number(zeros, base, at, row, num_scale_rows, ZEROS, STEP_GROUPS)
        value = value - (MORE + zero)
    elif MORE + ZERO > 0:
        value = value - (MORE + ZERO)
    if SUPER > 0:
        above = (base + at) // SUPER
        upper, upper_offset = _two_numbers(
            supers, above, 0, row, num_scale_rows, "f16" if OFFSETS != "" else "f32",
            "f16" if OFFSETS != "" else "", 0,
        )  # fmt: skip
        scale = scale * upper
    elif SCALES == "e4m3 times":
        scale = scale * supers[0]
    elif SCALES == "e4m3 over":
        scale = _quotient(scale, supers[0], supers[1])
    value = value * scale
    if OFFSETS == "f16":
        value = value + beside
    elif OFFSETS == "u4":
        value = value + beside * upper_offset
    elif OFFSETS != "":
        offset = _number(offsets, base, at, row, num_scale_rows, OFFSETS, STEP_GROUPS)
        value = value + offset * upper_offset
    return value


@triton.jit
def _scaled_field(
    tensors, table, rows, slab, i: tl.constexpr, f: tl.constexpr, N, num_scale_rows,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAIRED: tl.constexpr, UNROLL: tl.constexpr,
    SCALES: tl.constexpr, OFFSETS: tl.constexpr, SUPER: tl.constexpr,
    ZERO: tl.constexpr, ZEROS: tl.constexpr, LANES: tl.constexpr, PLAIN: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The same of codes with scales, in fp32 or already rounded."""
    BITS: tl.constexpr = LOW + HIGH
    UNIT: tl.constexpr = HIGH if HIGH > 0 and HIGH < LOW else LOW
    SLAB: tl.constexpr = 8 // UNIT * WIDTH
    columns = tl.arange(0, WIDTH)
    tiles = tensors[0] + (slab + i).to(tl.int64) * N * (WIDTH * BITS // UNIT)
    spots = rows[:, None] * WIDTH + columns[None, :]

    # The group, from the step's first one on where steps are whole groups.
    STEP: tl.constexpr = SLAB * UNROLL
    STEP_GROUPS: tl.constexpr = STEP // GROUP if GROUP > 0 and STEP % GROUP == 0 else 0
    start: tl.constexpr = i * SLAB + f * WIDTH
    if GROUP == 0:
        base, at = slab * 0, 0
    elif GROUP % WIDTH != 0:
        inputs = slab * SLAB + start + _column_of(columns, LANES)
        base, at = slab * 0, (inputs // GROUP)[None, :]
    elif STEP_GROUPS > 0:
        base, at = slab // UNROLL * STEP_GROUPS, start // GROUP
    else:
        base, at = (slab * SLAB + start) // GROUP, 0
    row = rows
    if ROWS > 1:
        if PAIRED:
            row = rows % 2 * (N // 2) + rows // 2
        row = row // ROWS
    row = row[:, None]

    IS_BF16: tl.constexpr = DTYPE == tl.bfloat16  # noqa: SIM300
    if KIND == "e2m1" and SCALES == "power128" and IS_BF16 and not PLAIN:
        exponents = _number(tensors[1], base, at, row, num_scale_rows, "whole", STEP_GROUPS)
        weight = e2m1_pairs(tl.load(tiles + spots), power_factor(exponents), f)
    else:
        value = _value(tiles, table, rows, spots, f, N, KIND, LOW, HIGH, WIDTH, PLAIN)
        weight = _with_scales(
            value, tensors, base, at, row, num_scale_rows,
            KIND, LOW, SCALES, OFFSETS, SUPER, ZERO, ZEROS, STEP_GROUPS,
        )  # fmt: skip
    return weight


@triton.jit
def weight_field(
    tensors,  # codes, scales, supers, offsets, zeros of `Slabs`; or `above_rows` for supers
    table,  # its values
    rows, slab, i: tl.constexpr, f: tl.constexpr, N, num_scale_rows,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all of a row
    ROWS: tl.constexpr,  # rows that share a scale
    PAIRED: tl.constexpr,  # rows are gate, up, gate, up ..., scales are not
    UNROLL: tl.constexpr,  # slabs of a step
    SCALES: tl.constexpr, OFFSETS: tl.constexpr, SUPER: tl.constexpr,
    ZERO: tl.constexpr, ZEROS: tl.constexpr,
    LANES: tl.constexpr,  # columns are in the order of `slabs.in_lanes`, and so are the results;
    # those of 2:4 are in that of `slabs.sparse_in_lanes`, and the results in that of the inputs
    PLAIN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[rows, WIDTH] of DTYPE: field f of slab + i; a step of UNROLL slabs begins at `slab`."""
    if KIND == "2:4" and LANES:
        weight = sparse_lanes(tensors[0], table, rows, slab + i, f, N)
    elif KIND == "2:4":
        weight = sparse_field(tensors[0], table, rows, slab + i, f, N, WIDTH)
    else:
        weight = _scaled_field(
            tensors, table, rows, slab, i, f, N, num_scale_rows,
            KIND, LOW, HIGH, WIDTH, GROUP, ROWS, PAIRED, UNROLL,
            SCALES, OFFSETS, SUPER, ZERO, ZEROS, LANES, PLAIN, DTYPE,
        )  # fmt: skip
    return weight.to(DTYPE)

"""Codes that become weights by way of fp32, in the registers that Hopper's matrix unit reads.

    weight = dtype((value(code) - zero) * scale + offset)

with the roundings of the form's own `dequantize`. Codes of eight bits have too many digits for the
shorter way of `stream_unpack.py`, scales below others have too many themselves, and values of a
table are any numbers. Products that an offset is added to are exact, so a fused multiply-add has
the bits of two roundings. Four bytes of a register are two pairs of inputs, in the order that is
told there; a code of 3, 5 or 6 bits has its high ones in a register of their own.
"""

from __future__ import annotations

from itertools import product

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["first_text", "float_pairs", "int_pairs", "lane_value", "table_pairs"]

# $0 and $1 are what is made; low and high codes; what is subtracted, the scale, the offset, each
# of these for four numbers that have the same.
_REGISTERS = gl.constexpr("=r,=r,r,r" + ",f" * 12)
_ZERO, _SCALE, _OFFSET = "$4", "$8", "$12"
_NUMBERS = "abcd"  # of the four bytes, in fp32
_TO = ("bf16x2", "f16x2")


def _rounded(has_offset: bool, to: str) -> str:
    """The numbers with scale and offset, as two registers of pairs."""
    step = "fma.rn.f32 {0}, {0}, {1}, {2};" if has_offset else "mul.rn.f32 {0}, {0}, {1};"
    scaled = "\n".join(step.format(n, _SCALE, _OFFSET) for n in _NUMBERS)
    return f"{scaled}\ncvt.rn.{to}.f32 $0, c, a;\ncvt.rn.{to}.f32 $1, d, b;"


def _field(of: str, into: str, bits: int, field: int) -> str:
    """One code of each byte of a plane. Signed bytes get 128 added."""
    if bits == 8:
        return f"xor.b32 {into}, {of}, 0x80808080;"
    mask = ((1 << bits) - 1) * 0x01010101
    down = bits * (field % (8 // bits))
    return f"shr.b32 {into}, {of}, {down};\nand.b32 {into}, {into}, {mask:#x};"


def _of_ints(low: int, high: int, field: int, has_offset: bool, to: str) -> str:
    """Codes as the low bits of 2**23."""
    above = ""
    if high:
        above = f"{_field('$3', 'u', high, field)}\nshl.b32 u, u, {low};\nor.b32 t, t, u;"
    digits = "\n".join(
        f"prmt.b32 {n}, t, 0x4B000000, 0x765{i};\nsub.rn.f32 {n}, {n}, {_ZERO};"
        for i, n in enumerate(_NUMBERS)
    )
    return f"""{{
        .reg .b32 t, u, a, b, c, d;
        {_field("$2", "t", low, field)}
        {above}
        {digits}
        {_rounded(has_offset, to)}
    }}"""


def _of_floats(to: str) -> str:
    """E4M3, which fp16 holds."""
    return f"""{{
        .reg .b16 low, high, ha, hb, hc, hd;
        .reg .b32 t, u, a, b, c, d;
        mov.b32 {{low, high}}, $2;
        cvt.rn.f16x2.e4m3x2 t, low;
        cvt.rn.f16x2.e4m3x2 u, high;
        mov.b32 {{ha, hb}}, t;
        mov.b32 {{hc, hd}}, u;
        cvt.f32.f16 a, ha;
        cvt.f32.f16 b, hb;
        cvt.f32.f16 c, hc;
        cvt.f32.f16 d, hd;
        {_rounded(False, to)}
    }}"""


def _of_table(field: int, to: str) -> str:
    """Lane i of a warp has value i % 16 of the table, and a shuffle reads the lane that the five
    lowest bits name: a code and whatever is above it."""
    looked_up = "\n".join(
        f"shr.b32 t, $2, {8 * i + 4 * field};\nshfl.sync.idx.b32 {n}, {_ZERO}, t, 0x1F, 0xFFFFFFFF;"
        for i, n in enumerate(_NUMBERS)
    )
    return f"""{{
        .reg .b32 t, a, b, c, d;
        {looked_up}
        {_rounded(False, to)}
    }}"""


# Bits of both planes, and the fields of a slab.
_PLANES = {(8, 0): 1, (4, 0): 2, (4, 2): 4, (4, 1): 8, (2, 0): 4, (2, 1): 8}
_INTS = gl.constexpr(
    tuple(
        _of_ints(*planes, field, has_offset, to)
        for planes, fields in _PLANES.items()
        for field, has_offset, to in product(range(fields), (False, True), _TO)
    )
)
_FLOATS = gl.constexpr(tuple(map(_of_floats, _TO)))
_TABLE = gl.constexpr(tuple(_of_table(f, to) for f, to in product((0, 1), _TO)))
_OWN = gl.constexpr("""{
    .reg .b32 lane;
    .reg .b64 place;
    mov.u32 lane, %laneid;
    and.b32 lane, lane, 15;
    mul.wide.u32 place, lane, 4;
    add.s64 place, place, $1;
    ld.global.nc.b32 $0, [place];
}""")


def first_text(low: int, high: int) -> int:
    """Where the texts of whole numbers in such planes begin: four for each field."""
    before = list(_PLANES)[: list(_PLANES).index((low, high))]
    return 4 * sum(_PLANES[planes] for planes in before)


@gluon.jit
def lane_value(table):
    """The lane's value of a table of 16 in fp32: another one in each thread, though it has no
    shape. So it must be made where it is used, and not be handed to another warp."""
    return gl.inline_asm_elementwise(_OWN, "=f,l", [table], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def int_pairs(
    low, high, zero, scale, offset,
    TEXT: gl.constexpr, HAS_OFFSET: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Whole numbers of a field, whose four texts begin at TEXT. `zero` has 2**23 more; without a
    high plane, or an offset, anything will do."""
    AT: gl.constexpr = TEXT + (2 if HAS_OFFSET else 0)
    if dtype == gl.float16:
        weight = gl.inline_asm_elementwise(
            _INTS[AT + 1], _REGISTERS, [low, high, zero, scale, offset],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        weight = gl.inline_asm_elementwise(
            _INTS[AT], _REGISTERS, [low, high, zero, scale, offset],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return weight


@gluon.jit
def float_pairs(codes, scale, dtype: gl.constexpr):
    """E4M3 codes times a scale in fp32."""
    if dtype == gl.float16:
        weight = gl.inline_asm_elementwise(
            _FLOATS[1], _REGISTERS, [codes, codes, scale, scale, scale],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        weight = gl.inline_asm_elementwise(
            _FLOATS[0], _REGISTERS, [codes, codes, scale, scale, scale],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return weight


@gluon.jit
def table_pairs(codes, own, scale, FIELD: gl.constexpr, dtype: gl.constexpr):
    """The table's values at one field of codes of four bits, times a scale in fp32. `own`: this
    lane's value."""
    if dtype == gl.float16:
        weight = gl.inline_asm_elementwise(
            _TABLE[2 * FIELD + 1], _REGISTERS, [codes, codes, own, scale, scale],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        weight = gl.inline_asm_elementwise(
            _TABLE[2 * FIELD], _REGISTERS, [codes, codes, own, scale, scale],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return weight

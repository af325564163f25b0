"""Codes that become weights by way of fp32, in the registers that Hopper's matrix unit reads.

    weight = dtype((value(code) - zero) * scale)

with one rounding, as the form's own `dequantize` has it. Codes of eight bits have too many digits
for the shorter way of `stream_unpack.py` unless scales have few, and values of a table are any
numbers. Four bytes of a register are two pairs of inputs, in the order that is told there.
"""

from __future__ import annotations

from functools import partial

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["byte_pairs", "float_pairs", "lane_value", "table_pairs"]

_NUMBERS = "abcd"  # of the four bytes, in fp32


def _rounded(to: str) -> str:
    """The numbers times the scale in $7, as two registers of pairs."""
    scaled = "".join(f"mul.rn.f32 {n}, {n}, $7;\n" for n in _NUMBERS)
    return f"""{scaled}
        cvt.rn.{to}.f32 $0, c, a;
        cvt.rn.{to}.f32 $1, d, b;
    """


def _of_bytes(to: str) -> str:
    """Signed bytes: with 128 added they are the low bits of 2**23. $3 is 2**23 + 128 + zero."""
    digits = "".join(
        f"prmt.b32 {n}, t, 0x4B000000, 0x765{i};\nsub.rn.f32 {n}, {n}, $3;\n"
        for i, n in enumerate(_NUMBERS)
    )
    return f"""{{
        .reg .b32 t, a, b, c, d;
        xor.b32 t, $2, 0x80808080;
        {digits}
        {_rounded(to)}
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
        {_rounded(to)}
    }}"""


def _of_table(field: int, to: str) -> str:
    """Lane i of a warp has value i % 16 of the table in $3, and a shuffle reads the lane that the
    five lowest bits name: a code and whatever is above it."""
    looked_up = "".join(
        f"shr.b32 t, $2, {8 * i + 4 * field};\nshfl.sync.idx.b32 {n}, $3, t, 0x1F, 0xFFFFFFFF;\n"
        for i, n in enumerate(_NUMBERS)
    )
    return f"""{{
        .reg .b32 t, a, b, c, d;
        {looked_up}
        {_rounded(to)}
    }}"""


_PAIRS = ("bf16x2", "f16x2")
_REGISTERS = gl.constexpr("=r,=r,r,f,f,f,f,f,f,f,f")  # codes, what is beside them, scales
# Two of each kind, for bf16 and fp16: bytes, floats, and a table's two fields.
_TEXTS = gl.constexpr(
    tuple(
        text
        for make in (_of_bytes, _of_floats, partial(_of_table, 0), partial(_of_table, 1))
        for text in map(make, _PAIRS)
    )
)
_OWN = gl.constexpr("""{
    .reg .b32 lane;
    .reg .b64 place;
    mov.u32 lane, %laneid;
    and.b32 lane, lane, 15;
    mul.wide.u32 place, lane, 4;
    add.s64 place, place, $1;
    ld.global.nc.b32 $0, [place];
}""")


@gluon.jit
def lane_value(table):
    """The lane's value of a table of 16 in fp32: another one in each thread, though it has no
    shape. So it must be made where it is used, and not be handed to another warp."""
    return gl.inline_asm_elementwise(_OWN, "=f,l", [table], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _made(WHICH: gl.constexpr, codes, beside, scale, dtype: gl.constexpr):
    if dtype == gl.float16:
        weight = gl.inline_asm_elementwise(
            _TEXTS[2 * WHICH + 1], _REGISTERS, [codes, beside, scale],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        weight = gl.inline_asm_elementwise(
            _TEXTS[2 * WHICH], _REGISTERS, [codes, beside, scale],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return weight


@gluon.jit
def byte_pairs(codes, zero, scale, dtype: gl.constexpr):
    """(codes - zero) * scale of signed bytes. `zero` and `scale` are in fp32."""
    return _made(0, codes, zero + 8388736.0, scale, dtype)


@gluon.jit
def float_pairs(codes, scale, dtype: gl.constexpr):
    """E4M3 codes times a scale in fp32."""
    return _made(1, codes, scale, scale, dtype)


@gluon.jit
def table_pairs(codes, own, scale, FIELD: gl.constexpr, dtype: gl.constexpr):
    """The table's values at one field of codes of four bits, times a scale in fp32. `own`: this
    lane's value."""
    return _made(2 + FIELD, codes, own, scale, dtype)

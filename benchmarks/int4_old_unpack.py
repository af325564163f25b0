"""Codes of four bits as the floats that Hopper's matrix unit reads, two in a register at a time.

    weight = dtype((code - zero) * scale)

with one rounding, as the form's own `dequantize` has it. A scale of 16 bits has 11 significant ones
at most: as the sum of two bf16 numbers it is exact, the product with the smaller one is exact too,
and a fused multiply-add rounds the rest once. In fp16 the scale itself is a factor. Codes become
floats as the low bits of 128 (bf16) or 1024 (fp16).

A register holds four bytes of codes. Its first and third byte are the first pair of inputs, its
second and fourth the next one: `slabs.in_lanes` stores them so, and a mask takes a pair apart.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["code_pairs", "power_pairs"]


def _pairs(field: int, ones: str) -> str:
    """Four bytes, in $2, as two registers of two codes, t0 and t1, with bits of a number above."""
    first = "mov.b32 t0, $2;" if field == 0 else "shr.b32 t0, $2, 4;"
    return f"""
        .reg .b32 t0, t1, p0, p1;
        {first}
        shr.b32 t1, $2, {8 + 4 * field};
        lop3.b32 t0, t0, 0x000F000F, {ones}, 0xEA;
        lop3.b32 t1, t1, 0x000F000F, {ones}, 0xEA;
    """


def _of_one(field: int, dtype: str, ones: str) -> str:
    """The scale is a number of the inputs' dtype."""
    return f"""{{
        {_pairs(field, ones)}
        sub.rn.{dtype} t0, t0, $3;
        sub.rn.{dtype} t1, t1, $4;
        mul.rn.{dtype} $0, t0, $5;
        mul.rn.{dtype} $1, t1, $6;
    }}"""


def _of_two_bf16(field: int) -> str:
    """The scale is the sum of two."""
    return f"""{{
        {_pairs(field, "0x43004300")}
        sub.rn.bf16x2 t0, t0, $3;
        sub.rn.bf16x2 t1, t1, $4;
        mul.rn.bf16x2 p0, t0, $7;
        mul.rn.bf16x2 p1, t1, $8;
        fma.rn.bf16x2 $0, t0, $5, p0;
        fma.rn.bf16x2 $1, t1, $6, p1;
    }}"""


def _of_power(field: int) -> str:
    """E2M1 as the top bits of a bf16 number, times 2**127: what the doubled table of the form
    holds, exactly. Then the scale, a power of two."""
    return f"""{{
        {_pairs(field, "0x00000000")}
        and.b32 p0, t0, 0x00080008;
        and.b32 p1, t1, 0x00080008;
        and.b32 t0, t0, 0x00070007;
        and.b32 t1, t1, 0x00070007;
        shl.b32 p0, p0, 12;
        shl.b32 p1, p1, 12;
        shl.b32 t0, t0, 6;
        shl.b32 t1, t1, 6;
        or.b32 t0, t0, p0;
        or.b32 t1, t1, p1;
        mul.rn.bf16x2 t0, t0, $3;
        mul.rn.bf16x2 t1, t1, $4;
        mul.rn.bf16x2 $0, t0, $5;
        mul.rn.bf16x2 $1, t1, $6;
    }}"""


_BF16 = gl.constexpr(tuple(_of_one(field, "bf16x2", "0x43004300") for field in (0, 1)))
_TWO_BF16 = gl.constexpr((_of_two_bf16(0), _of_two_bf16(1)))
_FP16 = gl.constexpr(tuple(_of_one(field, "f16x2", "0x64006400") for field in (0, 1)))
_POWER = gl.constexpr((_of_power(0), _of_power(1)))


@gluon.jit
def code_pairs(codes, zero, scale, FIELD: gl.constexpr, dtype: gl.constexpr, SCALES: gl.constexpr):
    """(codes - zero) * scale of one field of bytes, of dtype. `zero` and `scale` are in fp32, the
    scale a number of 16 bits."""
    if dtype == gl.float16:
        weight = gl.inline_asm_elementwise(
            _FP16[FIELD], "=r,=r,r,r,r,r,r", [codes, (zero + 1024.0).to(dtype), scale.to(dtype)],
            dtype=gl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    elif SCALES == "bf16":
        weight = gl.inline_asm_elementwise(
            _BF16[FIELD], "=r,=r,r,r,r,r,r", [codes, (zero + 128.0).to(dtype), scale.to(dtype)],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        most = scale.to(dtype)
        rest = (scale - most.to(gl.float32)).to(dtype)
        weight = gl.inline_asm_elementwise(
            _TWO_BF16[FIELD], "=r,=r,r,r,r,r,r,r,r",
            [codes, (zero + 128.0).to(dtype), most, rest],
            dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return weight


@gluon.jit
def power_pairs(codes, scale, FIELD: gl.constexpr):
    """E2M1 codes times a power of two, in bf16."""
    up = (scale * 0.0 + 1.7014118346046923e38).to(gl.bfloat16)  # 2**127
    return gl.inline_asm_elementwise(
        _POWER[FIELD], "=r,=r,r,r,r,r,r", [codes, up, scale.to(gl.bfloat16)],
        dtype=gl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip

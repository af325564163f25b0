"""E2M1 codes times powers of two as bf16 numbers, two in a register at a time, without rounding.

A code's sign and its three other bits, moved to where bf16 has its sign, the low bits of its
exponent and the top of its fraction, are the number that the form's doubled table holds, times
2**-127. One fused multiply-add brings that back and multiplies with the scale: the factor of both
is 2**(e - 1) for a scale of 2**(e - 128), which bf16 has for e up to 128 (`ops/slabs_of.py` looks).

A thread has four neighbouring bytes in a register. They become the high bytes of four halves, so
that the sign of the upper codes already lies where it should.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function

__all__ = ["e2m1_pairs", "power_factor"]


def _pair(out: int, bytes_: str, factor: int, field: int) -> str:
    sign = "shl.b32 t, t, 4;" if field == 0 else ""
    return f"""
        prmt.b32 t, $2, 0, {bytes_};
        shr.b32 u, t, {2 if field == 0 else 6};
        {sign}
        and.b32 u, u, 0x01C001C0;
        lop3.b32 t, t, 0x80008000, u, 0xEA;
        fma.rn.bf16x2 ${out}, t, ${factor}, nothing;
    """


def _text(field: int) -> str:
    """Adding -0 changes no number."""
    pairs = _pair(0, "0x1404", 3, field), _pair(1, "0x3424", 4, field)
    return f"{{ .reg .b32 t, u, nothing; mov.b32 nothing, 0x80008000; {' '.join(pairs)} }}"


_TEXTS = (_text(0), _text(1))


@constexpr_function
def _text_of(field: int) -> str:
    return _TEXTS[field]


@triton.jit
def power_factor(exponents):
    """2**(e - 1) in bf16, for e up to 128."""
    return ((exponents + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def e2m1_pairs(codes, factor, FIELD: tl.constexpr):
    """The low codes (FIELD 0) of bytes, or the high ones, times a `power_factor`: bf16."""
    text: tl.constexpr = _text_of(FIELD)
    return tl.inline_asm_elementwise(
        text, "=r,=r,r,r,r", [codes, tl.broadcast_to(factor, codes.shape)],
        dtype=tl.bfloat16, is_pure=True, pack=4,
    )  # fmt: skip

"""Codes of the cache as 16-bit floats, two words in a register at a time.

A word of 16 bits holds two codes of eight bits or four of four bits. The assembly takes two words
that lie in one register and makes a register of two floats for each part: shifts and masks put a
code among the bits of a number whose other bits are known, and one fused multiply-add takes those
away. Every step is exact.

- int8: its low seven bits behind 128, less 128, or less 256 where the sign is set. In fp16: all
  bits, the sign turned, behind 1024, less 1152.
- fp8: E4M3 as the low bits of a float's exponent and the high bits of its fraction, times the power
  of two between the two biases. Numbers below the normal ones come out right. Newer devices convert
  two bytes to fp16 in one instruction, with the same result.
- four bits: behind 64 (bf16) or 512 (fp16), where the last bit is worth a half, less 7.5 as well.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import constexpr_function
from triton.language import target_info

__all__ = ["CONVERTS", "TEXTS", "float_pairs"]

SUFFIX = {"bf16": "bf16x2", "fp16": "f16x2"}
AND_OR = "0xEA"  # (a & b) | c
XOR_OR = "0xBE"  # (a ^ b) | c
ONE = {"bf16": "0x3F803F80", "fp16": "0x3C003C00"}
NOTHING = "0x80008000"  # -0: added, it changes no number


def _byte(of: int) -> str:
    """Code `of` of each word as the low byte of t, with other bits above it."""
    return "mov.b32 t, $2;" if of == 0 else "shr.b32 t, $2, 8;"


def _signed_bf16(of: int) -> str:
    return f"""
        {_byte(of)}
        lop3.b32 u, t, 0x00800080, 0x43004300, {AND_OR};
        lop3.b32 t, t, 0x007F007F, 0x43004300, {AND_OR};
        fma.rn.bf16x2 ${of}, u, minus, t;
    """


def _signed_fp16(of: int) -> str:
    return f"""
        {_byte(of)}
        and.b32 t, t, 0x00FF00FF;
        lop3.b32 t, t, 0x00800080, 0x64006400, {XOR_OR};
        fma.rn.f16x2 ${of}, t, one, less;
    """


def _e4m3(of: int, dtype: str) -> str:
    """The sign goes to the top, the other bits to the top of the fraction. Shifts to the left are
    multiplications to the assembler, which leaves the logic unit to masks."""
    right, field = (4, "0x07F007F0") if dtype == "bf16" else (1, "0x3F803F80")
    moved = f"shl.b32 t, $2, 8; shl.b32 u, $2, {8 - right};"
    if of == 1:
        moved = f"mov.b32 t, $2; shr.b32 u, $2, {right};"
    return f"""
        {moved}
        and.b32 u, u, {field};
        lop3.b32 t, t, 0x80008000, u, {AND_OR};
        fma.rn.{SUFFIX[dtype]} ${of}, t, up, nothing;
    """


def _nibble(of: int, dtype: str) -> str:
    first = "shl.b32 t, $4, 1;" if of == 0 else f"shr.b32 t, $4, {4 * of - 1};"
    behind = "0x42804280" if dtype == "bf16" else "0x60006000"
    return f"""
        {first}
        lop3.b32 t, t, 0x001E001E, {behind}, {AND_OR};
        fma.rn.{SUFFIX[dtype]} ${of}, t, one, less;
    """


def _program(constants: dict[str, str], steps: list[str]) -> str:
    moved = " ".join(f"mov.b32 {name}, {value};" for name, value in constants.items())
    return f"{{ .reg .b32 t, u, {', '.join(constants)}; {moved} {' '.join(steps)} }}"


def _text(form: str, dtype: str) -> str:
    if form == "int8" and dtype == "bf16":
        return _program({"minus": "0xBF80BF80"}, [_signed_bf16(i) for i in range(2)])
    if form == "int8":
        constants = {"one": ONE[dtype], "less": "0xE480E480"}  # -1152
        return _program(constants, [_signed_fp16(i) for i in range(2)])
    if form == "fp8":
        up = {"bf16": "0x7B807B80", "fp16": "0x5C005C00"}[dtype]  # 2**120, 2**8
        constants = {"up": up, "nothing": NOTHING}
        return _program(constants, [_e4m3(i, dtype) for i in range(2)])
    less = {"bf16": "0xC28FC28F", "fp16": "0xE00FE00F"}[dtype]  # -71.5, -519.5
    constants = {"one": ONE[dtype], "less": less}
    return _program(constants, [_nibble(i, dtype) for i in range(4)])


# What Ada and later have: two neighbouring bytes in one instruction.
CONVERTS = """{ .reg .b32 t; .reg .b16 a, b;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {a, b}, t;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b; }"""
TEXTS = {(form, dtype): _text(form, dtype) for form in ("int8", "fp8", "int4") for dtype in SUFFIX}


@constexpr_function
def _text_of(bits: int, words: object, dtype: object, converts: bool) -> str:
    if bits == 8 and words == tl.uint16 and dtype == tl.float16 and converts:
        return CONVERTS
    form = "int4" if bits == 4 else "fp8" if words == tl.uint16 else "int8"
    return TEXTS[form, "fp16" if dtype == tl.float16 else "bf16"]


@constexpr_function
def _registers(bits: int) -> str:
    return ",".join(["=r"] * (16 // bits) + ["r"])


@constexpr_function
def _types(bits: int, dtype: object) -> tuple[object, ...]:
    return (dtype,) * (16 // bits)


@triton.jit
def float_pairs(words, dtype: tl.constexpr, BITS: tl.constexpr):
    """The parts of words as numbers of a 16-bit dtype."""
    text: tl.constexpr = _text_of(BITS, words.dtype, dtype, target_info.cuda_capability_geq(8, 9))
    registers: tl.constexpr = _registers(BITS)
    types: tl.constexpr = _types(BITS, dtype)
    return tl.inline_asm_elementwise(text, registers, [words], types, True, 2)

"""Two of every four weights as the registers that Hopper's matrix unit reads: values are moved, by
one byte permutation a register, and never computed with.

A register is half a run of four. Both values of the run are one word, low and high, which the
threads of both halves read. What half h of a run gets is said by two bits: n0, whether its first
weight is a value, and n1, whether its second one is. `slabs.sparse_in_lanes` orders values so that

    h = 0: first = n0 and low,   second = n1 and (high if n0 else low)
    h = 1: first = n0 and high,  second = n1 and (low if n0 else high)

Then the permutation's selector is linear in both bits, and one multiplication makes it: bits of a
register are eight apart, and those of another one, sixteen bits above, are multiplied past the end
of a selector, which has sixteen.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["BASES", "FACTORS", "PER_WORD", "sparse_pairs", "unpack_text"]

PER_WORD = 16  # registers of a word of bits
# Selectors of bytes of (zero, word): four nibbles, which for a halfword are 0x10 or 0x32 for zeros,
# 0x54 for the low value and 0x76 for the high one. First for h = 0, then for h = 1.
BASES = (0x1010, 0x3232)  # without both bits
FACTORS = (0x2244, 0xDE44)  # what n0 adds; n1, times 2**8, adds 0x4400, modulo 2**16


def unpack_text(outputs: list[str], words: list[str], bits: str, factor: str, base: str) -> str:
    """Instructions that fill the registers of a word of bits, of which n0 of register 8 f + i is
    number 16 f + i. Three neighbours need one shift: the factor may be halved twice."""
    lines = [
        ".reg .b32 moved, part, half, quarter, select;",
        f"shr.u32 half, {factor}, 1;",
        f"shr.u32 quarter, {factor}, 2;",
    ]
    for i in range(PER_WORD // 2):
        if i % 3 == 0:
            lines.append(f"shr.u32 moved, {bits}, {i};")
        lines.append(f"and.b32 part, moved, {0x01010101 << i % 3:#010x};")
        for register in (i, i + PER_WORD // 2):
            if register > i:
                lines.append("shr.u32 part, part, 16;")
            lines.append(f"mad.lo.u32 select, part, {(factor, 'half', 'quarter')[i % 3]}, {base};")
            lines.append(f"prmt.b32 {outputs[register]}, 0, {words[register]}, select;")
    return "{\n" + "\n".join(lines) + "\n}"


def _text() -> tuple[str, str]:
    """For an elementwise operation on twice as many weights, with its constraints. What elements
    share comes once for each of them."""
    count, weights = PER_WORD, 2 * PER_WORD
    outputs, words = ([f"${first + i}" for i in range(count)] for first in (0, count))
    shared = [f"${2 * count + i * weights}" for i in range(3)]
    constraints = ["=r"] * count + ["r"] * (count + 3 * weights)
    return unpack_text(outputs, words, *shared), ",".join(constraints)


_TEXT = gl.constexpr(_text()[0])
_CONSTRAINTS = gl.constexpr(_text()[1])
_PACK = gl.constexpr(2 * PER_WORD)
_BASES = gl.constexpr(BASES)
_FACTORS = gl.constexpr(FACTORS)


@gluon.jit
def sparse_pairs(words, bits, half):
    """Weights of the words' dtype. words: values in place of the weights, both of a run in each of
    its halves; bits and the number of the half, both in int32, are the same for all of a thread's
    `PER_WORD` registers in a row."""
    base = gl.where(half == 0, _BASES[0], _BASES[1])
    factor = gl.where(half == 0, _FACTORS[0], _FACTORS[1])
    return gl.inline_asm_elementwise(
        _TEXT, _CONSTRAINTS, [words, bits, factor, base],
        dtype=words.dtype, is_pure=True, pack=_PACK,
    )  # fmt: skip

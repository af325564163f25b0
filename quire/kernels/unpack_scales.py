"""Numbers that stand beside codes: scales, offsets and zeros, in words of four bytes.

A word holds one fp32, a scale in the low half and its offset or zero in the high one, or as many
neighbouring groups of a row as fit: two of 16 bits, four of 8, scale and offset of four bits in one
of these. Of scales of six bits three words hold 16 groups. Narrower loads could not be asked
for ahead of time. Words lie row by row within a stretch of groups, so the rows of a tile are
neighbours. `slabs.py` makes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["above_rows", "decoded", "part_of", "six_bits", "word_of"]


@triton.jit
def word_of(words, base, at, row, num_rows, PER: tl.constexpr, STATIC: tl.constexpr):
    """The word of group base + at. STATIC: `at` is known to the compiler and base fills words."""
    if STATIC:
        word = tl.load(words + (base // PER + at // PER) * num_rows + row)
    else:
        word = tl.load(words + (base + at) // PER * num_rows + row)
    return word


@triton.jit
def part_of(word, base, at, PER: tl.constexpr, STATIC: tl.constexpr):
    """The bits of group base + at. A shift that only the machine knows would keep Triton from
    unpacking in the registers that the matrix unit reads."""
    WIDTH: tl.constexpr = 32 // PER
    if PER == 1:
        bits = word
    elif STATIC:
        bits = (word >> (at % PER * WIDTH)) & ((1 << WIDTH) - 1)
    else:
        bits = (word >> ((base + at) % PER * WIDTH)) & ((1 << WIDTH) - 1)
    return bits


@triton.jit
def six_bits(words, base, at, row, num_rows, STATIC: tl.constexpr):
    """The scale of group base + at, from -32 to 31: nibbles of eight groups to a word, two of these
    words and one of two bits for each 16 groups (`slabs.pack_six_bits`)."""
    if STATIC:
        first = words + (base // 16 * 3 + at // 16 * 3) * num_rows + row
        within = at % 16
    else:
        first = words + (base + at) // 16 * 3 * num_rows + row
        within = (base + at) % 16
    low = tl.load(first + within // 8 * num_rows)
    high = tl.load(first + 2 * num_rows)
    number = ((low >> within % 8 * 4) & 15) | ((high >> within * 2) & 3) << 4
    return (number - 32).to(tl.float32)


@triton.jit
def above_rows(supers, rows):
    """The fp32 numbers above all scales of rows, and their reciprocals: [rows, 1]."""
    above = tl.load(supers + rows)[:, None].to(tl.float32, bitcast=True)
    return above, tl.math.div_rn(1.0, above)


@triton.jit
def _power(exponent):
    """2**(e - 128) in fp32, small ones too: a product of two powers of 2**-64 and more."""
    half = exponent // 2 - 64
    rest = exponent - 128 - half
    one = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return one * ((rest + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decoded(bits, KIND: tl.constexpr):
    """The fp32 number of some bits; "whole": these themselves."""
    if KIND == "f32":
        found = bits.to(tl.float32, bitcast=True)
    elif KIND == "f16":
        found = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "bf16":
        found = (bits << 16).to(tl.float32, bitcast=True)
    elif KIND == "whole":
        found = bits
    elif KIND == "power" or KIND == "power128":
        found = _power(bits)
    elif KIND == "e4m3 times" or KIND == "e4m3 over":  # without a sign, finite
        found = (bits << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    elif KIND == "u16" or KIND == "u8" or KIND == "u4":
        found = bits.to(tl.float32)
    else:
        tl.static_assert(KIND == "s8")
        found = ((bits ^ 128) - 128).to(tl.float32)
    return found

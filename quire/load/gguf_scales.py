"""Scales in a GGUF file that are no numbers: found before a weight is made of them.

A float whose exponent is all ones is infinite or NaN. Looking for those bits in the packed blocks
touches a byte or two of each, a small part of what decoding costs. Denormal scales are usual in
files and stay.
"""

from __future__ import annotations

from torch import Tensor

from quire.load.gguf_types import GGMLType


def find_bad_block(packed: Tensor, kind: GGMLType) -> int | None:
    """Index of a block with a scale that is not finite, in packed uint8 [..., row_bytes].

    >>> import torch
    >>> from quire.load.gguf_types import GGML_TYPES
    >>> packed = torch.zeros(3, 34, dtype=torch.uint8)
    >>> packed[2, 1] = 0x7C  # an infinite fp16
    >>> find_bad_block(packed, GGML_TYPES[8])
    2
    """
    blocks = packed.reshape(-1, kind.block_bytes)
    for exponent in _EXPONENTS.get(kind.name, ()):
        (at, mask), *more = exponent
        is_bad = blocks[:, at] & mask == mask
        for at, mask in more:
            is_bad &= blocks[:, at] & mask == mask
        if is_bad.any():
            return int(is_bad.nonzero()[0])
    return None


_Exponent = tuple[tuple[int, int], ...]  # the bytes of a block that hold its bits, with masks


def _halves(*starts: int) -> tuple[_Exponent, ...]:
    return tuple(((at + 1, 0x7C),) for at in starts)


_EXPONENTS: dict[str, tuple[_Exponent, ...]] = {
    "Q4_0": _halves(0),
    "Q4_1": _halves(0, 2),
    "Q5_0": _halves(0),
    "Q5_1": _halves(0, 2),
    "Q8_0": _halves(0),
    "Q2_K": _halves(80, 82),
    "Q3_K": _halves(108),
    "Q4_K": _halves(0, 2),
    "Q5_K": _halves(0, 2),
    "Q6_K": _halves(208),
    "IQ2_XXS": _halves(0),
    "IQ2_XS": _halves(0),
    "IQ2_S": _halves(0),
    "IQ3_XXS": _halves(0),
    "IQ3_S": _halves(0),
    "IQ1_S": _halves(0),
    "IQ1_M": (((55, 0x70), (53, 0xC0)),),  # an fp16 in nibbles
    "IQ4_NL": _halves(0),
    "IQ4_XS": _halves(0),
    "TQ1_0": _halves(52),
    "TQ2_0": _halves(64),
    "MXFP4": (((0, 0xFF),),),  # a bare exponent
    "NVFP4": tuple(((at, 0xFF),) for at in range(4)),  # 0x7F is zero there, says ggml
    "Q1_0": _halves(0),
    "Q2_0": _halves(0),
}

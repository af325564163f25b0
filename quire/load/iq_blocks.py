"""GGUF's IQ1, IQ2 and IQ3 blocks to float32: codes of whole groups of weights, from codebooks.

Every type has 256 weights to a block. A code picks a point of the type's codebook, a group of 8 (or
4) values; signs and a scale for 16 or 32 weights are kept beside. As in `dequant.py`, whole arrays
at a time, and the order of the float operations is the format's own. The codebooks are in
`iq_grids.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.load.iq_grids import grid

_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_BITS = tuple(range(8))
_SEVENS = (0, 7, 14, 21)  # four indices of signs below a scale's four bits
_TRIPLES = (0, 3, 6, 9)
_BYTES = (0, 8, 16, 24)
_DELTA = 0.125  # of IQ1: by how much points are moved, up or down


def _bytes(blocks: Tensor, at: int, count: int) -> Tensor:
    return blocks[:, at : at + count].int()


def _numbers(blocks: Tensor, at: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` bytes from `at`, copied, as little-endian numbers."""
    taken = blocks[:, at : at + count].clone(memory_format=torch.contiguous_format)
    return taken.view(dtype)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 at byte `at`, as float32 [n, 1]."""
    return _numbers(blocks, at, 2, torch.float16).float()


def _fields(numbers: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """[n, k] -> [n, k * shifts]: the fields of each number, one after the other.

    The mask also drops what a shift drags in from the sign.
    """
    return torch.stack([numbers >> shift & mask for shift in shifts], dim=-1).flatten(1)


def _signs(bits: Tensor) -> Tensor:
    """[n, k] bytes -> [n, k * 8] of 1.0 and -1.0, lowest bit first."""
    return 1.0 - 2.0 * _fields(bits, _BITS, 1)


def _even(indices: Tensor) -> Tensor:
    """Seven signs are kept of eight: the last one makes the number of minuses even."""
    parity = indices ^ indices >> 4
    parity = parity ^ parity >> 2
    return indices | ((parity ^ parity >> 1) & 1) << 7


def _scaled(name: str, codes: Tensor, scales: Tensor, signs: Tensor) -> Tensor:
    """Points of the codebook times scales [n, k], then signs [n, 256]."""
    points = _points(name, codes).view(*scales.shape, -1)
    return (scales.unsqueeze(-1) * points).flatten(1).mul_(signs)


def _points(name: str, codes: Tensor) -> Tensor:
    return grid(name).index_select(0, codes.reshape(-1))


def _iq2_xxs(blocks: Tensor) -> Tensor:
    # Four codes of a byte each, then 4 x 7 bits of signs and a scale's four on top; eight times.
    words = _numbers(blocks, 2, 64, torch.int32)
    codes, rest = _fields(words[:, 0::2], _BYTES, 255), words[:, 1::2]
    scales = _half(blocks, 0) * (0.5 + (rest >> 28 & 15)) * 0.25
    return _scaled("IQ2_XXS", codes, scales, _signs(_even(_fields(rest, _SEVENS, 127))))


def _iq2_xs(blocks: Tensor) -> Tensor:
    # Nine bits of code, seven of signs; then a scale for 16 weights in each nibble.
    both = _numbers(blocks, 2, 64, torch.int16).int()
    scales = _half(blocks, 0) * (0.5 + _fields(_bytes(blocks, 66, 8), _NIBBLES, 15)) * 0.25
    return _scaled("IQ2_XS", both & 511, scales, _signs(_even(both >> 9 & 127)))


def _iq2_s(blocks: Tensor) -> Tensor:
    # Codes of ten bits: eight in bytes of their own, two more from the bytes behind the signs.
    codes = _bytes(blocks, 2, 32) | _fields(_bytes(blocks, 66, 8), _PAIRS, 3) << 8
    scales = _half(blocks, 0) * (0.5 + _fields(_bytes(blocks, 74, 8), _NIBBLES, 15)) * 0.25
    return _scaled("IQ2_S", codes, scales, _signs(_bytes(blocks, 34, 32)))


def _iq3_xxs(blocks: Tensor) -> Tensor:
    rest = _numbers(blocks, 66, 32, torch.int32)  # as in IQ2_XXS
    scales = _half(blocks, 0) * (0.5 + (rest >> 28 & 15)) * 0.5
    signs = _signs(_even(_fields(rest, _SEVENS, 127)))
    return _scaled("IQ3_XXS", _bytes(blocks, 2, 64), scales, signs)


def _iq3_s(blocks: Tensor) -> Tensor:
    codes = _bytes(blocks, 2, 64) | _fields(_bytes(blocks, 66, 8), _BITS, 1) << 8
    scales = _half(blocks, 0) * (1 + 2 * _fields(_bytes(blocks, 106, 4), _NIBBLES, 15))
    return _scaled("IQ3_S", codes, scales, _signs(_bytes(blocks, 74, 32)))


def _iq1_s(blocks: Tensor) -> Tensor:
    # Eight numbers of 16 bits: the top three of four codes, a scale's three, how to move.
    high = _numbers(blocks, 34, 16, torch.int16).int()
    codes = _bytes(blocks, 2, 32) | _fields(high, _TRIPLES, 7) << 8
    scales = _half(blocks, 0) * (2 * (high >> 12 & 7) + 1)
    moved = _DELTA - 2 * _DELTA * (high >> 15 & 1)
    points = _points("IQ1_S", codes).view(len(blocks), 8, 32)
    return (points + moved.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).flatten(1)


def _iq1_m(blocks: Tensor) -> Tensor:
    # In each nibble the top three bits of a code, and how to move its group of eight.
    high = _fields(_bytes(blocks, 32, 16), _NIBBLES, 15)
    codes = _bytes(blocks, 0, 32) | (high & 7) << 8
    moved = _DELTA - 2 * _DELTA * (high >> 3)
    # Four numbers of 16 bits: four scales of three bits each, and a nibble of the fp16.
    packed = _numbers(blocks, 48, 8, torch.int16).int()
    nibbles = (packed >> 12 & 15) << torch.arange(0, 16, 4, device=blocks.device)
    super_scale = nibbles.sum(1, keepdim=True).short().view(torch.float16).float()
    scales = super_scale * (2 * _fields(packed, _TRIPLES, 7) + 1)
    points = _points("IQ1_S", codes).view(len(blocks), 32, 8) + moved.unsqueeze(-1)
    return points.view(len(blocks), 16, 16).mul_(scales.unsqueeze(-1)).flatten(1)


EXPANDERS: dict[str, Callable[[Tensor], Tensor]] = {  # blocks [n, block_bytes] -> [n, 256]
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}

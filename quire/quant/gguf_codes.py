"""From GGUF blocks to `Coded`: the same whole numbers and scales, taken out of their packing.

One function for each storage type, from its published block layout. Nothing is rounded: what
`Coded.dequantize` makes is bit for bit what ggml defines. Codes go through planes: 16 bytes of
every block, side by side, so that each operation runs over one long array. That is numpy's work:
it copies 16 bytes as one item, and starts no threads, whose barriers cost small tensors dear.
Types with codebooks of whole groups (IQ1, IQ2, IQ3) have no codes of single weights;
`load/iq_blocks.py` expands them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.quant.coded import Coded

if TYPE_CHECKING:
    from quire.load.gguf_types import GGMLType

_Bytes = NDArray[np.uint8]
_Planes = NDArray[np.uint64]  # [..., words]: 16 bytes of each block in the last dimension

_RUN = 1 << 18  # weights unpacked at once: what lies between stays in cache
_LINE = "V16"  # 16 bytes as one item
_EACH_BYTE = 0x0101010101010101
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def can_code(kind: GGMLType) -> bool:
    return kind.name in _CODERS


def coded(packed: Tensor, kind: GGMLType) -> Coded:
    """Packed uint8 [rows, row_bytes] of a type that `can_code`.

    >>> from quire.load.gguf_types import GGML_TYPES
    >>> coded(torch.zeros(3, 2 * 34, dtype=torch.uint8), GGML_TYPES[8]).shape
    (3, 64)
    """
    blocks = packed.reshape(-1, kind.block_bytes).numpy()
    return _CODERS[kind.name](_Packed(blocks, packed.shape[0], kind.block_size))


@dataclass(frozen=True, slots=True)
class _Packed:
    """A tensor in its blocks, in the order of its rows."""

    blocks: _Bytes  # [blocks, block_bytes]
    num_rows: int
    block_size: int

    def codes(self, unpack: Callable[[_Bytes], _Planes]) -> Tensor:
        """[rows, row]: `unpack` makes planes, 16 weights each, of a run of blocks."""
        out = np.empty((len(self.blocks), self.block_size), np.uint8)
        run = _RUN // self.block_size
        for start in range(0, len(out), run):
            some = self.blocks[start : start + run]
            lines = out[start : start + run].view(_LINE)
            planes = unpack(some).reshape(lines.shape[1], -1)
            for i, plane in enumerate(planes):
                lines[:, i] = plane.view(_LINE)
        return self.by_row(torch.from_numpy(out))

    def halves(self, at: int) -> Tensor:
        """The fp16 at byte `at` of every block, [rows, blocks of a row]."""
        return self.by_row(self.bytes(at, 2).view(torch.float16))

    def bytes(self, at: int, count: int) -> Tensor:
        """[blocks, count], a copy: what is made must not hold on to the file."""
        items = self.blocks[:, at : at + count].view(f"V{count}").copy()
        return torch.from_numpy(items.view(np.uint8))

    def by_row(self, values: Tensor) -> Tensor:
        return values.reshape(self.num_rows, -1)


def _planes(blocks: _Bytes, at: int, count: int, groups: int = 1) -> _Planes:
    """`count` bytes from `at` as [groups, lines, words]."""
    lines = blocks[:, at : at + count].view(_LINE)
    out = np.empty(lines.shape[::-1], _LINE)
    for i, line in enumerate(out):
        line[:] = lines[:, i]
    return out.view(np.uint64).reshape(groups, -1, 2 * len(blocks))


def _fields(planes: _Planes, bits: int) -> _Planes:
    """[groups, lines, words] -> [groups, 8 // bits, lines, words]: the fields of each byte.

    The lowest comes first. A shift drags in bits of the next byte, which the mask drops.
    """
    mask = np.uint64(_EACH_BYTE * ((1 << bits) - 1))
    out = np.empty((len(planes), 8 // bits, *planes.shape[1:]), np.uint64)
    for i in range(8 // bits):
        np.right_shift(planes, np.uint64(bits * i), out=out[:, i])
    out &= mask
    return out


def _nibbles(at: int) -> Callable[[_Bytes], _Planes]:
    """Blocks of 32: low halves of 16 bytes are the first 16 weights, high halves the others."""
    return lambda blocks: _fields(_planes(blocks, at, 16), 4)


def _nibbles_and_bits(at: int) -> Callable[[_Bytes], _Planes]:
    """Four bytes at `at` hold the fifth bits, one after the other; their nibbles follow."""
    bits = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
    fifth = (bits << 4).view(np.uint64).reshape(-1)  # [256] words, eight weights each

    def unpack(blocks: _Bytes) -> _Planes:
        planes = _fields(_planes(blocks, at + 4, 16), 4).reshape(2, -1)
        for i, plane in enumerate(planes):
            first = at + 2 * i
            plane |= fifth[blocks[:, first : first + 2]].reshape(-1)
        return planes

    return unpack


def _q4_0(packed: _Packed) -> Coded:
    return Coded(packed.codes(_nibbles(2)), 4, 32, packed.halves(0), zero=8)


def _q4_1(packed: _Packed) -> Coded:
    return Coded(packed.codes(_nibbles(4)), 4, 32, packed.halves(0), offsets=packed.halves(2))


def _q5_0(packed: _Packed) -> Coded:
    return Coded(packed.codes(_nibbles_and_bits(2)), 5, 32, packed.halves(0), zero=16)


def _q5_1(packed: _Packed) -> Coded:
    codes = packed.codes(_nibbles_and_bits(4))
    return Coded(codes, 5, 32, packed.halves(0), offsets=packed.halves(2))


def _q8_0(packed: _Packed) -> Coded:
    return Coded(packed.codes(lambda blocks: _planes(blocks, 2, 32)), 8, 32, packed.halves(0))


def _pairs_of_bits(at: int) -> Callable[[_Bytes], _Planes]:
    """Blocks of 256: each 32 of the 64 bytes hold four groups of 32 weights."""
    return lambda blocks: _fields(_planes(blocks, at, 64, groups=2), 2)


def _q2_k(packed: _Packed) -> Coded:
    both = packed.bytes(0, 16)  # a scale in the low nibble, an offset in the high one
    return Coded(
        packed.codes(_pairs_of_bits(16)),
        bits=2,
        block=16,
        scales=packed.by_row(both & 15),
        offsets=packed.by_row(both >> 4),
        super_size=16,
        super_scales=packed.halves(80),
        super_offsets=-packed.halves(82),
    )


def _q3_k_codes(blocks: _Bytes) -> _Planes:
    """Byte i of the first 32 holds the third bit of weight i of group g in its bit g."""
    third = _fields(_planes(blocks, 0, 32), 1) << np.uint64(2)
    low = _fields(_planes(blocks, 32, 64, groups=2), 2)
    return low | third.reshape(low.shape)


def _q3_k(packed: _Packed) -> Coded:
    # Low nibbles of eight bytes, then their high ones, below two bits from four bytes: scales
    # 4k .. 4k + 3 have theirs at bit 2k.
    low, high = packed.bytes(96, 8), packed.bytes(104, 4)
    nibbles = torch.cat((low & 15, low >> 4), dim=1)
    tops = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=1)
    return Coded(
        packed.codes(_q3_k_codes),
        bits=4,
        block=16,
        scales=packed.by_row(nibbles | tops << 4).view(torch.int8) - 32,
        zero=4,
        super_size=16,
        super_scales=packed.halves(108),
    )


def _q4_k_codes(blocks: _Bytes) -> _Planes:
    return _fields(_planes(blocks, 16, 128, groups=4), 4)


def _q5_k_codes(blocks: _Bytes) -> _Planes:
    """Byte i of the 32 high bytes holds the fifth bit of weight i of group g in its bit g."""
    fifth = _fields(_planes(blocks, 16, 32), 1) << np.uint64(4)
    low = _fields(_planes(blocks, 48, 128, groups=4), 4)
    return low | fifth.reshape(low.shape)


def _with_k_scales(codes: Tensor, bits: int, packed: _Packed) -> Coded:
    """Twelve bytes hold 8 scales and 8 offsets of 6 bits.

    Groups 0-3 have theirs in the low six bits of bytes 0-3 and 4-7; groups 4-7 take a nibble of
    bytes 8-11 and the two top bits left over.
    """
    low, mid, high = packed.bytes(4, 4), packed.bytes(8, 4), packed.bytes(12, 4)
    return Coded(
        codes,
        bits=bits,
        block=32,
        scales=packed.by_row(torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)),
        offsets=packed.by_row(torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), dim=1)),
        super_size=8,
        super_scales=packed.halves(0),
        super_offsets=-packed.halves(2),
    )


def _q4_k(packed: _Packed) -> Coded:
    return _with_k_scales(packed.codes(_q4_k_codes), 4, packed)


def _q5_k(packed: _Packed) -> Coded:
    return _with_k_scales(packed.codes(_q5_k_codes), 5, packed)


def _q6_k_codes(blocks: _Bytes) -> _Planes:
    """Two halves of 128 weights, each four groups of 32.

    64 low bytes carry the low nibbles (first the low ones for groups 0 and 1, then the high ones
    for 2 and 3), 32 high bytes the top two bits, group g in bits 2g and 2g + 1.
    """
    top = _fields(_planes(blocks, 128, 64, groups=2), 2) << np.uint64(4)
    low = _fields(_planes(blocks, 0, 128, groups=2), 4)
    return low | top.reshape(low.shape)


def _q6_k(packed: _Packed) -> Coded:
    return Coded(
        packed.codes(_q6_k_codes),
        bits=6,
        block=16,
        scales=packed.by_row(packed.bytes(192, 16)).view(torch.int8),
        zero=32,
        super_size=16,
        super_scales=packed.halves(208),
    )


def _iq4_nl(packed: _Packed) -> Coded:
    return Coded(packed.codes(_nibbles(2)), 4, 32, packed.halves(0), table=IQ4_VALUES)


def _iq4_xs(packed: _Packed) -> Coded:
    # Two nibbles from each of four bytes, below two bits each from a little-endian uint16.
    low, high = packed.bytes(4, 4), packed.bytes(2, 2)
    nibbles = torch.stack((low & 15, low >> 4), dim=-1).flatten(1)
    tops = torch.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(1)
    return Coded(
        packed.codes(lambda blocks: _fields(_planes(blocks, 8, 128, groups=8), 4)),
        bits=4,
        block=32,
        scales=packed.by_row(nibbles | tops << 4).view(torch.int8) - 32,
        super_size=8,
        super_scales=packed.halves(0),
        table=IQ4_VALUES,
    )


def _mxfp4(packed: _Packed) -> Coded:
    return Coded(
        packed.codes(_nibbles(1)),
        bits=4,
        block=32,
        scales=packed.by_row(packed.bytes(0, 1)),
        table=_E2M1_DOUBLED,
        are_powers=True,
    )


def _nvfp4_codes(blocks: _Bytes) -> _Planes:
    """Eight bytes are 16 weights: low halves the first eight, high halves the others."""
    out = np.empty((4, len(blocks), 2), np.uint64)
    for i, plane in enumerate(out):
        words = np.ascontiguousarray(blocks[:, 4 + 8 * i : 12 + 8 * i]).view(np.uint64)[:, 0]
        for half in range(2):
            plane[:, half] = words >> np.uint64(4 * half) & np.uint64(15 * _EACH_BYTE)
    return out


def _nvfp4(packed: _Packed) -> Coded:
    eighths = packed.by_row(packed.bytes(0, 4)) & 127  # the sign is not read
    return Coded(
        packed.codes(_nvfp4_codes),
        bits=4,
        block=16,
        scales=eighths.masked_fill(eighths == 127, 0),
        super_scales=torch.full((packed.num_rows, 1), 0.5, device="cpu"),  # the table is doubled
        table=_E2M1_DOUBLED,
        eighths="times",
    )


def _in_turn(at: int, bits: int, values: Sequence[int]) -> Callable[[_Bytes], _Planes]:
    """Bytes from `at` hold neighbours, the first one lowest; `values` of the fields are codes."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = np.arange(256, dtype=np.uint8)[:, None] >> shifts & ((1 << bits) - 1)
    codes = np.array(values, np.uint8)[fields].view(f"V{len(shifts)}")[:, 0]  # of each byte
    size = 16 * bits // 8  # bytes of a plane

    def unpack(blocks: _Bytes) -> _Planes:
        planes = [codes[blocks[:, i : i + size]] for i in range(at, blocks.shape[1], size)]
        return np.stack(planes).view(np.uint64)

    return unpack


def _q1_0(packed: _Packed) -> Coded:
    """A bit is the sign: codes of two bits, 0 for -1 and 2 for 1."""
    return Coded(packed.codes(_in_turn(2, 1, (0, 2))), 2, 32, packed.halves(0), zero=1, share=4)


def _q2_0(packed: _Packed) -> Coded:
    codes = packed.codes(_in_turn(2, 2, range(4)))
    return Coded(codes, 2, 32, packed.halves(0), zero=1, share=2)


def _ternary(codes: Tensor, halves: Tensor) -> Coded:
    return Coded(codes, 2, 32, halves, zero=1, share=8)


def _tq1_0_codes(blocks: _Bytes) -> _Planes:
    """Five digits of base 3 in a byte, four in each of the last: q / 243 of a byte's 256 steps.

    Multiplying by three moves the next digit above the byte; digit k of all bytes of a group
    comes before digit k + 1.
    """
    planes = _planes(blocks, 0, 48).view(np.uint8).reshape(3, -1)
    digits = [_digit(planes[:2], k) for k in range(5)] + [_digit(planes[2:], k) for k in range(5)]
    last = np.stack([_digit(blocks[:, 48:52], k) for k in range(4)], axis=1)
    return np.concatenate((*digits, last.reshape(1, -1))).view(np.uint64)


def _digit(numbers: _Bytes, k: int) -> _Bytes:
    rest = numbers * np.uint8(3**k)  # wraps: the digits above are gone
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def _tq1_0(packed: _Packed) -> Coded:
    return _ternary(packed.codes(_tq1_0_codes), packed.halves(52))


def _tq2_0(packed: _Packed) -> Coded:
    return _ternary(packed.codes(_pairs_of_bits(0)), packed.halves(64))


_CODERS: dict[str, Callable[[_Packed], Coded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}

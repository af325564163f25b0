"""Where a step's adapters lie: a table by slot, and tiles of rows that share a slot.

An adapter's A and B of one product are anywhere in the device's memory. The table says where, as
the distance from one tensor, so that compilers know how addresses are aligned. Adapters come and
go, of any rank, while a captured graph reads the same table. Rows
of a step are sorted into tiles of TILE rows with one slot each. `low_rank_shrink.py` and
`low_rank_expand.py` read both.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PLACE", "RANKS", "TILE", "Places", "place_at", "shrink_shape", "tile_at"]

TILE = tl.constexpr(16)  # rows of a tile
PLACE = tl.constexpr(4)  # int64 of one A and B: places of both, rank, bits of the fp32 scale
RANKS = tl.constexpr(16)  # ranks are padded to a multiple of this many

_CHUNK = 256  # inputs of one chain at least
_MOST_CHUNKS = 32


class Places(NamedTuple):
    """The adapters of one product."""

    origin: Tensor  # of the weights' dtype; both are so many numbers behind it, or before
    table: Tensor  # [slots, linears, parts, PLACE] int64, of all products; slot 0 is no adapter
    linear: int
    sizes: tuple[int, ...]  # outputs of each part
    num_ranks: int  # the most that an adapter has here

    def kernel_args(self) -> tuple[Tensor, Tensor, int]:
        """(origin, the first slot's parts, how far the next slot's are)"""
        return self.origin, self.table[0, self.linear], self.table.stride(0)


def shrink_shape(num_in: int) -> tuple[int, int]:
    """(inputs of a chain, chains) that a product of so many inputs is cut into. By nothing else:
    the cut decides on bits.

    >>> shrink_shape(4096), shrink_shape(14336), shrink_shape(64)
    ((256, 16), (512, 28), (256, 1))
    """
    chunk = _CHUNK
    while chunk * _MOST_CHUNKS < num_in:
        chunk *= 2
    return chunk, -(-num_in // chunk)


@triton.jit
def tile_at(tiles, tile):
    """(slot, rows [TILE]) of a tile; -1: no row."""
    first = tiles + tile * (TILE + 1)
    return tl.load(first), tl.load(first + 1 + tl.arange(0, TILE))


@triton.jit
def place_at(table, slot, slot_stride, part):
    """(place of A, place of B, rank, scale)"""
    place = table + slot.to(tl.int64) * slot_stride + part * PLACE
    low, high = tl.load(place), tl.load(place + 1)
    rank = tl.load(place + 2).to(tl.int32)
    scale = tl.load(place + 3).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.multiple_of(low, 16), tl.multiple_of(high, 16), tl.multiple_of(rank, 16), scale

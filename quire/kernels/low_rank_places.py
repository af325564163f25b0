"""Where a step's adapters lie: a table by slot, and tiles of rows with the slots that they have.

An adapter's A and B of one product are anywhere in the device's memory. The table says where, as
the distance from one tensor, so that compilers know how addresses are aligned. Adapters come and
go, of any rank, while a captured graph reads the same table. Rows of a step are sorted by their
slots and cut into tiles of TILE; a tile names each of its slots once. `low_rank_shrink.py` and
`low_rank_expand.py` read both.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    *("PLACE", "RANKS", "TILE", "TILE_WORDS"),
    *("Places", "place_at", "rows_at", "shrink_shape", "slots_at"),
]

TILE = tl.constexpr(16)  # rows of a tile, and slots at most
# Of a tile: how many slots; its rows, -1 for none; which slot each has, -1 for none; the slots.
TILE_WORDS = tl.constexpr(1 + 3 * 16)
PLACE = tl.constexpr(4)  # int64 of one A and B: places of both, rank, bits of the fp32 scale
RANKS = tl.constexpr(16)  # ranks are padded to a multiple of this many

_CHAIN = 1024  # inputs of one chain at least
_MOST_CHAINS = 8


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
    ((1024, 4), (2048, 7), (1024, 1))
    """
    chain = _CHAIN
    while chain * _MOST_CHAINS < num_in:
        chain *= 2
    return chain, -(-num_in // chain)


@triton.jit
def rows_at(tile):
    """(rows, which of the tile's slots each has), [TILE] each."""
    i = tl.arange(0, TILE)
    return tl.load(tile + 1 + i), tl.load(tile + 1 + TILE + i)


@triton.jit
def slots_at(tile, count, index):
    """Slots of a tile by their place in it; 0, which has no ranks, behind the last."""
    return tl.load(tile + 1 + 2 * TILE + index, mask=index < count, other=0)


@triton.jit
def place_at(table, slot, slot_stride, part):
    """Where the table has a slot's A and B."""
    return table + slot.to(tl.int64) * slot_stride + part * PLACE

"""Rows of a step in tiles of one adapter each, as the GPU's kernels take them.

Rows are cut into blocks of at most BLOCK_ROWS first: fp32 sums of a block are all that is held of
a product at once. No tensors; `step_on_gpu.py` uploads what is made here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLOCK_ROWS = 1024
TILE = 16  # rows: `kernels/low_rank_places.py`

Slots = np.ndarray[Any, np.dtype[np.int64]]  # 0: no adapter
Tiles = np.ndarray[Any, np.dtype[np.int32]]  # [tiles, 1 + TILE]: slot, rows; -1: no row


class Block(NamedTuple):
    """Rows from `begin` to `end`, and which of the tiles are theirs."""

    begin: int
    end: int
    first: int
    last: int


class RowTiles(NamedTuple):
    tiles: Tiles  # rows count from the beginning of their block
    blocks: tuple[Block, ...]

    @staticmethod
    def of(slots: Slots) -> RowTiles:
        """
        >>> RowTiles.of(np.array([2, 0, 2])).tiles[:, :4].tolist()
        [[0, 1, -1, -1], [2, 0, 2, -1]]
        """
        made, blocks, first = [], [], 0
        for begin in range(0, len(slots), BLOCK_ROWS):
            tiles = tiles_of(slots[begin : begin + BLOCK_ROWS])
            end, last = min(begin + BLOCK_ROWS, len(slots)), first + len(tiles)
            blocks.append(Block(begin, end, first, last))
            made.append(tiles)
            first = last
        return RowTiles(np.concatenate(made) if made else tiles_of(slots), tuple(blocks))

    def padded(self) -> Tiles:
        """As many tiles as rows, where `padded_blocks` says: a block has no more of its own."""
        made = np.full((self.blocks[-1].end, 1 + TILE), -1, dtype=np.int32)
        made[:, 0] = 0
        for begin, _, first, last in self.blocks:
            made[begin : begin + last - first] = self.tiles[first:last]
        return made


def padded_blocks(num_rows: int) -> tuple[Block, ...]:
    """
    >>> padded_blocks(3)
    (Block(begin=0, end=3, first=0, last=3),)
    """
    begins = range(0, num_rows, BLOCK_ROWS)
    bounds = ((begin, min(begin + BLOCK_ROWS, num_rows)) for begin in begins)
    return tuple(Block(*bound, *bound) for bound in bounds)


def tiles_of(slots: Slots) -> Tiles:
    order = np.argsort(slots, kind="stable")
    values, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    tiles_each = -(-counts // TILE)
    first = np.cumsum(tiles_each) - tiles_each  # tile where each slot begins
    place = np.arange(len(slots)) - np.repeat(starts, counts)  # of a row among its slot's
    made = np.full((int(tiles_each.sum()), 1 + TILE), -1, dtype=np.int32)
    made[:, 0] = np.repeat(values, tiles_each)
    made[np.repeat(first, counts) + place // TILE, 1 + place % TILE] = order
    return made

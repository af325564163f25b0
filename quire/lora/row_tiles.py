"""Rows of a step in tiles, sorted by their adapters, as the GPU's kernels take them.

Rows are cut into blocks of at most BLOCK_ROWS first: fp32 sums of a block are all that is held of
a product at once. How many tiles there are follows from the number of rows alone, so a captured
graph takes any mix. No tensors; `step_on_gpu.py` uploads what is made here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLOCK_ROWS = 1024
TILE = 16  # rows: `kernels/low_rank_places.py`
TILE_WORDS = 1 + 3 * TILE

Slots = np.ndarray[Any, np.dtype[np.int64]]  # 0: no adapter
# [tiles, TILE_WORDS]: how many slots; rows, -1 for none; which slot each has, -1 for none; slots
Tiles = np.ndarray[Any, np.dtype[np.int32]]


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
        blocks = blocks_of(len(slots))
        made = [tiles_of(slots[block.begin : block.end]) for block in blocks]
        return RowTiles(np.concatenate(made) if made else tiles_of(slots), blocks)


def blocks_of(num_rows: int) -> tuple[Block, ...]:
    """
    >>> blocks_of(1030)
    (Block(begin=0, end=1024, first=0, last=64), Block(begin=1024, end=1030, first=64, last=65))
    """
    made: list[Block] = []
    first = 0
    for begin in range(0, num_rows, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, num_rows)
        last = first + -(-(end - begin) // TILE)
        made.append(Block(begin, end, first, last))
        first = last
    return tuple(made)


def tiles_of(slots: Slots) -> Tiles:
    """
    >>> made = tiles_of(np.array([2, 0, 2, 5]))[0]
    >>> made[0], made[1:6].tolist(), made[17:22].tolist(), made[33:36].tolist()
    (np.int32(2), [1, 0, 2, 3, -1], [-1, 0, 0, 1, -1], [2, 5, 0])
    """
    num_tiles = -(-len(slots) // TILE)
    order = np.argsort(slots, kind="stable")
    rows = np.full(num_tiles * TILE, -1, dtype=np.int32)
    rows[: len(slots)] = order
    sorted_slots = np.zeros(num_tiles * TILE, dtype=np.int64)
    sorted_slots[: len(slots)] = slots[order]
    own = sorted_slots.reshape(num_tiles, TILE)
    begins = own > 0  # where a slot's rows begin in a tile
    begins[:, 1:] &= own[:, 1:] != own[:, :-1]
    which = np.where(own > 0, begins.cumsum(1) - 1, -1)
    made = np.zeros((num_tiles, TILE_WORDS), dtype=np.int32)
    made[:, 0] = begins.sum(1)
    made[:, 1 : 1 + TILE] = rows.reshape(num_tiles, TILE)
    made[:, 1 + TILE : 1 + 2 * TILE] = which
    tile, place = np.nonzero(begins)
    made[tile, 1 + 2 * TILE + which[tile, place]] = own[tile, place]
    return made

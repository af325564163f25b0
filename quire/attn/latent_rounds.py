"""Rounds of expanded attention: which slots are expanded together, and which queries read them.

A context is cut at fixed positions, multiples of BLOCK_KEYS, and a round expands one such block of
each of several sequences, a bounded number of keys in all. Rounds follow one another along the
context; a tile of queries that sees several blocks carries its softmax state from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.forward import Batch

BLOCK_KEYS = 4096
MAX_ROUND_KEYS = 2 * BLOCK_KEYS

_Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Round:
    slots: Tensor  # [keys] int64
    # Rows of (first token in the part, tokens, position of the first, row of key 0 of the block
    # among the expanded, first key position, one past the last, whether it is the tile's last)
    tiles: Tensor  # [tiles, 7] int32


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    rounds: tuple[Round, ...]
    has_states: bool  # some tile takes part in several rounds


def plan_rounds(batch: Batch, tile_tokens: int, block_keys: int = BLOCK_KEYS) -> ExpandedPlan:
    ends = batch.host_context_lens.astype(np.int64)
    lens = batch.host_query_lens.astype(np.int64)
    first_tokens = np.cumsum(lens) - lens
    rounds = []
    num_blocks = -(-int(ends.max(initial=0)) // block_keys)
    for block in range(num_blocks):
        low = block * block_keys
        for seqs in _packed(np.flatnonzero(ends > low), np.minimum(ends - low, block_keys)):
            keys = np.minimum(ends[seqs] - low, block_keys)
            bases = np.cumsum(keys) - keys
            tiles = [
                _tiles(int(first_tokens[s]), int(lens[s]), int(ends[s]), tile_tokens, low, base)
                for s, base in zip(seqs, bases, strict=True)
            ]
            rounds.append(_round(batch, seqs, low, keys, np.concatenate(tiles), block_keys))
    return ExpandedPlan(tuple(rounds), num_blocks > 1)


def _packed(seqs: _Ints, keys: _Ints) -> list[_Ints]:
    """Runs of sequences whose keys fit a round."""
    runs: list[list[int]] = []
    room = 0
    for seq in seqs.tolist():
        if not runs or keys[seq] > room:
            runs.append([])
            room = MAX_ROUND_KEYS
        runs[-1].append(seq)
        room -= int(keys[seq])
    return [np.asarray(run) for run in runs]


def _tiles(first: int, length: int, end: int, tokens: int, low: int, base: int) -> _Ints:
    """Tiles of one sequence that see keys from `low` on; `_round` fills in the last column."""
    start = np.arange(0, length, tokens)
    count = np.minimum(tokens, length - start)
    position = end - length + start
    columns = [first + start, count, position, np.full_like(start, base)]
    columns += [np.full_like(start, low), position + count, np.zeros_like(start)]
    tiles = np.stack(columns, 1)
    return tiles[tiles[:, 5] > low]


def _round(
    batch: Batch, seqs: _Ints, low: int, keys: _Ints, tiles: _Ints, block_keys: int
) -> Round:
    high = low + block_keys
    tiles[:, 6] = tiles[:, 5] <= high
    tiles[:, 5] = np.minimum(tiles[:, 5], high)
    tiles = tiles[np.argsort(tiles[:, 4] - tiles[:, 5], kind="stable")]  # most keys first
    positions = low + np.arange(int(keys.sum())) - np.repeat(np.cumsum(keys) - keys, keys)
    owners = np.repeat(seqs, keys)
    sizes = [len(positions), len(owners), tiles.size]
    packed = np.concatenate((positions, owners, tiles.reshape(-1))).astype(np.int32)
    device = batch.page_table.device
    host = torch.from_numpy(packed)
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    at, owner, flat = sent.split(sizes)
    rows, at = batch.rows[owner.long()].long(), at.long()
    pages = batch.page_table[rows, at // batch.page_size].long()
    return Round(pages * batch.page_size + at % batch.page_size, flat.view(-1, 7))

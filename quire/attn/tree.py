"""Trees of drafts as backends in Python take them: every draft a sequence of its own.

A draft is one query, over the keys of its row up to the root and then over the drafts on its path
(`Batch.paths`). Keys are put in the order of positions before anything is computed, so a draft's
sums are those of a decode. The native library does the same in C (`native/src/span.h`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.forward import Batch

Ints = np.ndarray[Any, np.dtype[np.int64]]


def by_node(batch: Batch) -> Batch:
    """The same step, in which each token of a tree is a sequence of one query."""
    if batch.paths is None:
        return batch
    starts, lens = batch.query_starts.numpy(), batch.host_query_lens
    depths = batch.paths[:, 0].numpy()  # [tokens]
    is_tree = np.zeros(len(lens), dtype=bool)
    is_fed = lens > 0
    is_tree[is_fed] = depths[starts[:-1][is_fed]] >= 0
    seqs = np.repeat(np.arange(len(lens)), np.where(is_tree, lens, 1))
    query_lens = np.where(is_tree, 1, lens)[seqs].astype(np.int32)
    query_starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    own = batch.positions.numpy()[np.minimum(query_starts[:-1], len(depths) - 1)] + 1
    context_lens = np.where(is_tree[seqs], own, batch.host_context_lens[seqs]).astype(np.int32)
    prompts = batch.host_prompt_lens
    return replace(
        batch,
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(context_lens),
        rows=batch.rows[torch.from_numpy(seqs)],
        host_query_lens=query_lens,
        host_context_lens=context_lens,
        host_prompt_lens=None if prompts is None else prompts[seqs],
    )


class Listed(NamedTuple):
    """Keys that some sequences of one query read from places that are not their positions."""

    seqs: Ints  # [keys] which of the sequences
    positions: Ints
    places: Ints

    @property
    def num_places(self) -> int:
        """Places that any of the sequences must have at hand."""
        return int(self.places.max()) + 1


def listed(batch: Batch, seqs: Ints) -> Listed | None:
    """Of sequences of a batch from `by_node`; None: every key lies where its position says."""
    if batch.paths is None:
        return None
    paths = batch.paths.numpy()[batch.query_starts.numpy()[seqs]]
    nums = np.maximum(paths[:, 0], 0).astype(np.int64)
    at = np.repeat(np.arange(len(seqs)), nums)
    nth = np.arange(len(at)) - np.repeat(np.cumsum(nums) - nums, nums)
    places = paths[at, 1 + nth].astype(np.int64)
    positions = (batch.host_context_lens[seqs] - nums)[at] + nth
    moved = places != positions
    return Listed(at[moved], positions[moved], places[moved]) if moved.any() else None

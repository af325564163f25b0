"""Walks over a step's trees on the device, along the drafts that were right, for nobody to wait.

The host says where each tree's drafts lie and how deep it is; which of them were right is known on
the device alone. So a walk is as long as its tree is deep. It gives the tokens of the step that a
chain of as many drafts would have, and what must move to which slot. Behind the last right draft
it repeats itself, and slots move to where they are. `kernels/tree_walk.py` walks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.runner.rows import RequestRows
from quire.runner.upload import IntArray
from quire.spec.tree import paths_of
from quire.step import Work

# Of a tree, as the kernel reads it.
ROW, START, TOKEN, SAMPLE, DRAFTS, DEPTH, TOKEN_AT, SAMPLE_AT, MOVE_AT = range(9)
NO_PARENT = -1


class Walked(NamedTuple):
    tokens: Tensor  # [tokens of the chains] int64, which of the step's these are
    samples: Tensor  # the same of its samples
    sources: Tensor  # [groups, moves] int64 slots
    targets: Tensor


def depth_of(work: Work) -> int:
    """Of its drafts, how many can be right."""
    if not work.parents:
        return work.num_drafts
    return max(map(len, paths_of(work.parents)))


def chain_of(work: Work) -> Work:
    """The same with a chain as deep as its tree."""
    if not work.parents:
        return work
    depth = depth_of(work)
    return work._replace(num_tokens=1 + depth, num_drafts=depth, drafts=(), parents=())


def stage_walks(works: Sequence[Work], arrays: dict[str, IntArray]) -> None:
    """Add to a step's upload what its trees look like, if there are any."""
    if not any(work.parents for work in works):
        return
    trees: list[tuple[int, ...]] = []
    tokens: list[np.ndarray] = []
    samples: list[np.ndarray] = []
    token = sample = token_at = sample_at = move_at = 0
    for work in works:
        num_samples = 1 + work.num_drafts if work.sample else 0
        chain = chain_of(work)
        kept = 1 + chain.num_drafts if work.sample else 0
        if work.parents:
            at = (token, sample, work.num_drafts, kept - 1, token_at, sample_at, move_at)
            trees.append((work.row, work.start, *at))
            move_at += kept - 1
        # Of a tree the device writes over them.
        tokens.append(np.arange(token, token + chain.num_tokens))
        samples.append(np.arange(sample, sample + kept))
        token, token_at = token + work.num_tokens, token_at + chain.num_tokens
        sample, sample_at = sample + num_samples, sample_at + kept
    width = 1 + max(work.num_drafts for work in works)
    parents = np.full((len(trees), 1 << (width - 1).bit_length()), NO_PARENT, np.int32)
    for own, work in zip(parents, (work for work in works if work.parents), strict=True):
        own[1 : 1 + len(work.parents)] = work.parents
    arrays["trees"], arrays["tree_parents"] = np.asarray(trees, np.int32), parents
    arrays["chain_tokens"] = np.concatenate(tokens).astype(np.int64)
    arrays["chain_samples"] = np.concatenate(samples).astype(np.int64)


def walk(
    works: Sequence[Work],
    sent: Mapping[str, Tensor],
    drawn: Tensor,
    drafts: Tensor,
    rows: RequestRows,
    page_size: int,
) -> Walked:
    """Of works whose samples drew `drawn`, with `drafts` in the places behind each. What was drawn
    along the walk goes into the rows."""
    # Here and not above: CPU installs need no triton.
    from quire.kernels.tree_walk import walk_trees

    trees = sent["trees"].view(-1, MOVE_AT + 1)
    parents = sent["tree_parents"].view(len(trees), -1)
    tokens, samples = sent["chain_tokens"], sent["chain_samples"]
    num_moves = sum(depth_of(work) for work in works if work.parents)
    shape = (2, len(rows.page_tables), num_moves)
    sources, targets = torch.empty(shape, dtype=torch.int64, device=drawn.device)
    made = Walked(tokens, samples, sources, targets)
    walk_trees(trees, parents, (drawn, drafts), (rows.tokens, rows.page_tables), page_size, made)
    return made

"""StepTrees: the trees of drafts among a step's works, as arrays.

A draft's *place* is where it lies: in its row, and in the slots of the row's pages. Places count on
from the newest token, one for each draft, so siblings have places of their own and one position.
Each draft reads the drafts before it through a list of their places (`Batch.paths`). What becomes
of a tree after the draw is `tree_rest.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.request import RequestId
from quire.runner.upload import IntArray, Uploader
from quire.spec.tree import Parents, children_of, paths_of
from quire.step import Work

NO_TREE = -1
WIDTH = 8  # paths are padded to multiples of it: kernels and graphs are made for few widths


@lru_cache(maxsize=1024)
def _paths(parents: Parents) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[nodes, 1 + depth]: how many drafts lead to each node, and which."""
    paths = paths_of(parents)
    made = np.zeros((len(paths), 1 + max(map(len, paths))), np.int32)
    for node, path in enumerate(paths):
        made[node, : 1 + len(path)] = (len(path), *path)
    return made


class Nodes(NamedTuple):
    """What a step of single tokens reads of its trees, on the device."""

    places: Tensor  # [tokens] int32
    paths: Tensor  # [tokens, 1 + depth] int32, as in `Batch`

    @staticmethod
    def of(sent: Mapping[str, Tensor]) -> Nodes | None:
        """Of a step's upload; None: nobody feeds a tree."""
        if "paths" not in sent:
            return None
        return Nodes(sent["places"], sent["paths"].view(len(sent["places"]), -1))


class Sequences(NamedTuple):
    """A step's sequences, by their rows and lengths."""

    rows: IntArray
    query_lens: IntArray
    context_lens: IntArray


class TreeNode(NamedTuple):
    """One draft of a work, or 0: the newest known token. A chain is a tree too."""

    work: Work
    node: int

    @property
    def parents(self) -> Parents:
        return self.work.parents or tuple(range(self.work.num_drafts))

    @property
    def children(self) -> tuple[int, ...]:
        return children_of(self.parents)[self.node]

    @property
    def place(self) -> int:
        return self.work.start + self.node

    def alone(self, request_id: RequestId) -> Work:
        """A work that feeds it and draws once."""
        return Work(request_id, self.work.row, self.place, 1, True)


class StepTrees:
    def __init__(self, paths: IntArray, shifts: IntArray) -> None:
        """`paths` [tokens, 1 + depth] as in `Batch`; `shifts` [tokens]: how far each token's place
        lies behind its position."""
        self.paths, self.shifts = paths, shifts

    @staticmethod
    def of(works: Sequence[Work], num_tokens: int | None = None) -> StepTrees | None:
        """Of a step of so many tokens, those that pad it last (None: there are none of these).
        Returns None where nobody feeds a tree."""
        trees = [work.parents for work in works if work.parents]
        if not trees:
            return None
        if num_tokens is None:
            num_tokens = sum(work.num_tokens for work in works)
        made = StepTrees.empty(num_tokens, max(_paths(parents).shape[1] for parents in trees))
        end = 0
        for work in works:
            begin, end = end, end + work.num_tokens
            if work.parents:
                assert work.num_tokens == 1 + len(work.parents), f"more than a tree: {work}"
                made._put(slice(begin, end), _paths(work.parents), work.start)
                made.shifts[begin:end] += np.arange(end - begin, dtype=np.int32)
        return made

    @staticmethod
    def of_nodes(nodes: Sequence[TreeNode]) -> StepTrees:
        """Of a step that feeds one node after the other, each at its place."""
        width = max(_paths(node.parents).shape[1] for node in nodes)
        made = StepTrees.empty(len(nodes), width)
        for at, node in enumerate(nodes):
            path = _paths(node.parents)[node.node : node.node + 1]
            made._put(slice(at, at + 1), path, node.work.start)
            made.shifts[at] += node.node
        return made

    @staticmethod
    def empty(num_tokens: int, width: int) -> StepTrees:
        shape = num_tokens, -(-width // WIDTH) * WIDTH
        made = StepTrees(np.zeros(shape, np.int32), np.zeros(num_tokens, np.int32))
        made.paths[:, 0] = NO_TREE
        return made

    def apart(self, seqs: Sequences) -> Sequences:
        """The same step, in which each token of a tree is a sequence that ends with it."""
        starts = np.cumsum(seqs.query_lens) - seqs.query_lens
        is_tree = self.paths[np.minimum(starts, len(self.paths) - 1), 0] != NO_TREE
        counts = np.where(is_tree & (seqs.query_lens > 0), seqs.query_lens, 1)
        at = np.repeat(np.arange(len(counts)), counts)
        nth = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        own = (seqs.context_lens - seqs.query_lens)[at] + nth + 1 - self.shifts[starts[at] + nth]
        lens = np.where(is_tree[at], own, seqs.context_lens[at])
        queries = np.where(is_tree[at], 1, seqs.query_lens[at])
        return Sequences(seqs.rows[at], queries.astype(np.int32), lens.astype(np.int32))

    def _put(self, at: slice, paths: IntArray, start: int) -> None:
        self.paths[at, : paths.shape[1]] = paths
        self.paths[at, 1:] += start
        self.shifts[at] = -paths[:, 0]

    def history(
        self, tokens: Tensor, rows: Tensor, fed: IntArray, lens: IntArray, uploader: Uploader
    ) -> Tensor:
        """[samples, most of `lens`] ids before each sample, by position.

        `tokens` are the ids of `rows` by place; `fed` is the token that each sample is drawn
        after, among those of the step."""
        found = tokens[rows, : int(lens.max())]
        paths = self.paths[fed]
        nums = np.maximum(paths[:, 0], 0)  # drafts before each sample
        samples = np.repeat(np.arange(len(paths)), nums)
        nth = np.arange(len(samples)) - np.repeat(np.cumsum(nums) - nums, nums)
        listed = np.stack((samples, paths[samples, 1 + nth], (lens - nums)[samples] + nth))
        at, places, positions = uploader.send_one(torch.from_numpy(listed).long())
        found[at, positions] = tokens[rows[at], places]
        return found

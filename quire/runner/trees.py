"""StepTrees: the trees of drafts among a step's works, as arrays.

A draft's *place* is where it lies: in its row, and in the slots of the row's pages. Places count on
from the newest token, one for each draft, so siblings have places of their own and one position.
Each draft reads the drafts before it through a list of their places (`Batch.paths`). What becomes
of a tree after the draw is `tree_rest.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.runner.upload import IntArray
from quire.spec.tree import Parents, paths_of
from quire.step import Work

NO_TREE = -1


@lru_cache(maxsize=1024)
def _paths(parents: Parents) -> np.ndarray[Any, np.dtype[np.int32]]:
    """[nodes, 1 + depth]: how many drafts lead to each node, and which."""
    paths = paths_of(parents)
    made = np.zeros((len(paths), 1 + max(map(len, paths))), np.int32)
    for node, path in enumerate(paths):
        made[node, : 1 + len(path)] = (len(path), *path)
    return made


class StepTrees:
    def __init__(self, works: Sequence[Work]) -> None:
        num_tokens = sum(work.num_tokens for work in works)
        width = max(_paths(work.parents).shape[1] for work in works if work.parents)
        self.paths = np.zeros((num_tokens, width), np.int32)
        self.paths[:, 0] = NO_TREE
        # How far each token's place lies behind its position.
        self.shifts: IntArray = np.zeros(num_tokens, np.int32)
        end = 0
        for work in works:
            begin, end = end, end + work.num_tokens
            if not work.parents:
                continue
            assert work.num_tokens == 1 + len(work.parents), f"a tree behind more than one: {work}"
            nodes = _paths(work.parents)
            self.paths[begin:end, : nodes.shape[1]] = nodes
            self.paths[begin:end, 1:] += work.start
            self.shifts[begin:end] = np.arange(len(nodes)) - nodes[:, 0]

    @staticmethod
    def of(works: Sequence[Work]) -> StepTrees | None:
        return StepTrees(works) if any(work.parents for work in works) else None

    def history(self, tokens: Tensor, rows: Tensor, fed: IntArray, lens: IntArray) -> Tensor:
        """[samples, most of `lens`] ids before each sample, by position.

        `tokens` are the ids of `rows` by place; `fed` is the token that each sample is drawn
        after, among those of the step."""
        found = tokens[rows, : int(lens.max())]
        paths = self.paths[fed]
        nums = np.maximum(paths[:, 0], 0)  # drafts before each sample
        samples = np.repeat(np.arange(len(paths)), nums)
        nth = np.arange(len(samples)) - np.repeat(np.cumsum(nums) - nums, nums)
        places = torch.from_numpy(paths[samples, 1 + nth]).long()
        positions = torch.from_numpy((lens - nums)[samples] + nth).long()
        at = torch.from_numpy(samples)
        found[at, positions] = tokens[rows[at], places]
        return found

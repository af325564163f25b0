"""Prune: passes that set weights to zero and leave the others in their dtype.

What a method decides is one matrix at a time (`cut`): which weights go, and whether the others move
to make up for it. What all of them share stands here: how many go, and how it is stored.
`compress/reconstruct.py` comes after, for every method alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.layouts import sparse24
from quire.compress.passes.recipe import Kept, Pass, Recipe
from quire.compress.seen import Needs, Seen
from quire.compress.sparsity import Sparsity


class Prune(Pass):
    widths = ()
    takes = ("sparsity", "pattern", "reconstruct", "plain")

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.sparsity = Sparsity.of(recipe.sparsity, recipe.pattern)
        self.dtype, self.reconstructs = dtype, recipe.reconstruct
        self.packs = self.sparsity.is_two_of_four and not recipe.plain
        if recipe.reconstruct:
            self.needs = Needs(rows=True, gram=self.needs.gram)

    @abstractmethod
    def cut(self, weight: Tensor, seen: Seen | None, module: str) -> Tensor:
        """[out, in] with zeros. Must not change what it is given."""

    def check(self, module: str, shape: tuple[int, int]) -> None:
        self.sparsity.check(module, shape[1])

    def act(self, matrices: Sequence[Matrix], block: BlockTensors, seen: dict[str, Seen]) -> None:
        for matrix in matrices:
            weight = block.tensors[matrix.name]
            block.changed[matrix.name] = self.cut(weight, seen.get(matrix.site), matrix.module)

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.changed[matrix.name].to(self.dtype)
        return sparse24.pack(weight) if self.packs else {"weight": weight}

    def said(self, kept: Kept) -> dict[str, object]:
        """Other patterns are plain weights, some of them zero."""
        return sparse24.said(list(kept.modules)) if self.packs else {}

"""RTN: round to nearest. Needs no text, and is the baseline that every other pass must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.grid import Grid
from quire.compress.layouts import compressed
from quire.compress.passes.recipe import Kept, Pass, Recipe, check_groups, scale_dtype
from quire.compress.seen import Seen


class Rtn(Pass):
    widths = (4, 2, 3, 8)
    takes = ("group", "asymmetric")

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        usual = None if self.bits == 8 else 128
        self.grid = Grid(self.bits, recipe.group_size(usual), recipe.asymmetric, scale_dtype(dtype))

    def check(self, module: str, shape: tuple[int, int]) -> None:
        check_groups(module, shape[1], self.grid)

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        return compressed.pack_words(self.grid.nearest(block.tensors[matrix.name]), self.grid)

    def said(self, kept: Kept) -> dict[str, object]:
        weights = compressed.int_weights(self.grid)
        return compressed.said("pack-quantized", weights, None, list(kept.modules))

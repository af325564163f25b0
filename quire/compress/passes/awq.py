"""AWQ: weights that meet large inputs are scaled up before rounding, so that they lose less.

An input's scale is a power of its mean magnitude, divided by another power of how much of their
groups' ranges its weights take; which power, is searched for each product (Lin et al., arXiv
2306.00978). Its inverse is folded into the norm or product before. Then every group's range is cut
by as much as moves the outputs least, but for queries and keys, whose product suffers more than the
search can see. Codes on the grid that this leaves are chosen as GPTQ chooses them, each making up
for the errors of those before, but with a Hessian that is damped far more: what few inputs have in
common on the calibration text they need not have in common elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.folds import Fold
from quire.compress.grid import TINIEST, Grid
from quire.compress.hessian import STRONG_DAMP, inverse_factor
from quire.compress.layouts import awq as layout
from quire.compress.passes.gptq import Rounding
from quire.compress.passes.recipe import Kept, Recipe, check_groups
from quire.compress.passes.search import LEAST, Folding
from quire.compress.seen import Needs, Seen

POWERS = 20  # tried, from 0 to 1
CUTS = 10  # tried of each group's range, down to half of it
ROWS = 2048  # outputs whose ranges are searched at once


class Awq(Folding):
    needs = Needs(rows=True, gram=True)
    takes = ("group",)

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.grid = Grid(self.bits, recipe.group_size(), True, torch.float16)

    def check(self, module: str, shape: tuple[int, int]) -> None:
        check_groups(module, shape[1], self.grid)
        layout.check(module, shape)

    def tried(self, fold: Fold, block: BlockTensors, heard: Seen) -> Iterator[Tensor]:
        matrices = [matrix for site in fold.sites for matrix in block.at(site)]
        shares = torch.cat([self._shares(block.tensors[matrix.name]) for matrix in matrices])
        weights, inputs = shares.mean(0).clamp(min=LEAST), heard.mean.clamp(min=LEAST)
        powers = (i / POWERS for i in range(POWERS + 1))
        return (inputs**power / weights ** (1 - power) for power in powers)

    def _shares(self, weight: Tensor) -> Tensor:
        """[out, in]: each weight's magnitude as a share of the largest in its group."""
        split = self.grid.split(weight).abs()
        return (split / split.amax(-1, keepdim=True).clamp(min=TINIEST)).view_as(weight)

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        assert seen is not None and seen.gram is not None
        cut: Tensor | float = 1.0
        if len(seen.rows) and not {"q", "k"} & matrix.parts.keys():
            some = weight.split(ROWS)
            cut = torch.cat([best_cuts(part, seen.rows, self.grid) for part in some])
        order = seen.gram.diagonal().argsort(descending=True, stable=True)
        factor = inverse_factor(seen.gram, order, matrix.module, STRONG_DAMP)
        steps = self.grid.steps(self.grid.split(weight), cut)
        return layout.pack(Rounding(self.grid, order, True).of(weight, factor, steps), self.grid)

    def said(self, kept: Kept) -> dict[str, object]:
        return layout.said(self.grid, list(kept.modules))

    def rounded(self, rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return rows @ (self.grid.rounded(weight * scale) / scale).t()


def best_cuts(weight: Tensor, rows: Tensor, grid: Grid) -> Tensor:
    """[out, groups]: how much of each group's range is best kept, judged by the group's share of
    the outputs on these rows."""
    split = grid.split(weight)  # [out, groups, group]
    inputs = rows.view(len(rows), split.shape[1], -1).transpose(0, 1)  # [groups, rows, group]
    gram = inputs.transpose(1, 2) @ inputs  # [groups, group, group]
    best = torch.ones(split.shape[:2], device=weight.device)
    least = torch.full_like(best, float("inf"))
    for i in range(CUTS):
        cut = 1.0 - i / (2 * CUTS)
        moved = grid.split(grid.rounded(weight, cut)) - split
        moved = moved.transpose(0, 1)  # [groups, out, group]
        cost = ((moved @ gram) * moved).sum(-1).t()  # [out, groups]
        better = cost < least
        best, least = torch.where(better, cut, best), torch.where(better, cost, least)
    return best

"""SmoothQuant: W8A8, with outliers moved from the inputs, where they hurt, into the weights.

Inputs are divided by `max|x| ** alpha / max|w| ** (1 - alpha)`, and what comes before takes it over
(Xiao et al., arXiv 2211.10438). Alpha is searched for each product, with inputs rounded row by row
to int8 and weights output by output, as they are when the model runs. Products whose outputs still
move by twice what rounding costs normal numbers keep their floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.folds import Fold
from quire.compress.grid import Grid
from quire.compress.layouts import compressed
from quire.compress.passes.recipe import Kept, Recipe, scale_dtype
from quire.compress.passes.search import LEAST, Folding
from quire.compress.seen import Seen
from quire.ops.int8_inputs import round_rows

ALPHAS = 20  # tried, from 0 to 1
# A share of the outputs' energy: twice what normal numbers lose. 2,048 of them lose 0.7e-4 when
# inputs are rounded, and as much again when weights are.
MOST_LOST = 3e-4


class SmoothQuant(Folding):
    widths = (8,)

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.grid = Grid(self.bits, None, False, scale_dtype(dtype))

    def tried(self, fold: Fold, block: BlockTensors, heard: Seen) -> Iterator[Tensor]:
        matrices = [matrix for site in fold.sites for matrix in block.at(site)]
        largest = [block.tensors[matrix.name].abs().amax(0) for matrix in matrices]
        weights = torch.stack(largest).amax(0).clamp(min=LEAST)
        inputs = heard.most.clamp(min=LEAST)
        return (inputs ** (i / ALPHAS) / weights ** (1 - i / ALPHAS) for i in range(ALPHAS + 1))

    def spared(
        self, matrices: Sequence[Matrix], block: BlockTensors, seen: dict[str, Seen]
    ) -> dict[str, float]:
        """Experts are not judged: those of a layer run as one product, in one form."""
        found: dict[str, float] = {}
        for site in dict.fromkeys(matrix.site for matrix in matrices):
            if site.startswith("experts.") or site not in seen or not len(seen[site].rows):
                continue
            together = [matrix for matrix in matrices if matrix.site == site]
            weights = torch.cat([block.tensors[matrix.name] for matrix in together])
            lost = self.lost(seen[site].rows, weights)
            if lost > MOST_LOST:
                found |= {matrix.module: lost for matrix in together}
        return found

    def lost(self, rows: Tensor, weight: Tensor) -> float:
        """By rows [tokens, in] and a weight [out, in]: a share of the energy of their outputs."""
        wanted = rows @ weight.t()
        moved = self.rounded(rows, weight, torch.ones_like(rows[0])) - wanted
        return (moved.square().sum() / wanted.square().sum().clamp(min=LEAST)).item()

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        return compressed.pack_bytes(self.grid.nearest(block.tensors[matrix.name]), self.grid)

    def said(self, kept: Kept) -> dict[str, object]:
        inputs = {"num_bits": 8, "type": "int", **compressed.DYNAMIC_TOKEN}
        weights = compressed.int_weights(self.grid)
        return compressed.said("int-quantized", weights, inputs, list(kept.modules))

    def rounded(self, rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return round_rows(rows / scale) @ self.grid.rounded(weight * scale).t()

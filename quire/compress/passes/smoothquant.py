"""SmoothQuant: W8A8, with outliers moved from the inputs, where they hurt, into the weights.

Inputs are divided by `max|x| ** alpha / max|w| ** (1 - alpha)`, and what comes before takes it over
(Xiao et al., arXiv 2211.10438). Alpha is searched for each product, with inputs rounded row by row
to int8 and weights output by output, as they are when the model runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.folds import folds_of
from quire.compress.grid import Grid
from quire.compress.layouts import compressed
from quire.compress.passes.recipe import Kept, Pass, Recipe, scale_dtype
from quire.compress.passes.search import LEAST, best_scale, loudest
from quire.compress.seen import Needs, Seen
from quire.models.spec import ModelSpec
from quire.ops.int8_inputs import round_rows

ALPHAS = 20  # tried, from 0 to 1


class SmoothQuant(Pass):
    needs = Needs(rows=True)

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        recipe.refuse(
            static_inputs="--static-inputs",
            storage="--type",
            asymmetric="--asymmetric",
            group="--group-size: a row has one scale",
            act_order="--no-act-order",
            static_groups="--no-static-groups",
        )
        self.grid = Grid(recipe.bits_among((8,), 8), None, False, scale_dtype(dtype))

    def fold(self, block: BlockTensors, seen: dict[str, Seen], spec: ModelSpec) -> None:
        for fold in folds_of(spec, block):
            if (heard := loudest(fold, seen)) is None:
                continue
            matrices = [matrix for site in fold.sites for matrix in block.at(site)]
            largest = [block.tensors[matrix.name].abs().amax(0) for matrix in matrices]
            weights = torch.stack(largest).amax(0).clamp(min=LEAST)
            inputs = heard.most.clamp(min=LEAST)
            tried = (
                inputs ** (i / ALPHAS) / weights ** (1 - i / ALPHAS) for i in range(ALPHAS + 1)
            )
            scale = best_scale(fold, tried, block, seen, self._outputs)
            if scale is not None:
                fold.apply(scale, block, seen, spec.norm_offset)

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        return compressed.pack_bytes(self.grid.nearest(block.tensors[matrix.name]), self.grid)

    def said(self, kept: Kept) -> dict[str, object]:
        inputs = {"num_bits": 8, "type": "int", **compressed.DYNAMIC_TOKEN}
        weights = compressed.int_weights(self.grid)
        return compressed.said("int-quantized", weights, inputs, list(kept.modules))

    def _outputs(self, rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return round_rows(rows / scale) @ self.grid.rounded(weight * scale).t()

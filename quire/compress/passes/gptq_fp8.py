"""GPTQ to eight-bit floats (E4M3): one scale an output, and errors spread as GPTQ spreads them.

The file is that of `compress/passes/fp8.py`. Rounding to nearest leaves each product an error of
its own; here inputs are rounded one after the other, from the most to the least active, and those
to come make up for what is lost (`compress/hessian.py`). The Hessian is damped as AWQ's is: with
less, other text loses more than by rounding. No group of inputs has a scale, so the order leaves no
trace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.hessian import STRONG_DAMP, in_turn, inverse_factor
from quire.compress.passes.fp8 import Fp8, row_scales, to_codes
from quire.compress.passes.recipe import Recipe
from quire.compress.seen import Needs, Seen


class GptqFp8(Fp8):
    takes = ("static_inputs", "act_order")

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.needs = Needs(rows=True, gram=True)
        self.act_order = recipe.act_order

    def codes(
        self, matrix: Matrix, block: BlockTensors, seen: Seen | None
    ) -> tuple[Tensor, Tensor]:
        assert seen is not None and seen.gram is not None
        weight = block.tensors[matrix.name]
        order = torch.arange(weight.shape[1], device=weight.device)
        if self.act_order:
            order = seen.gram.diagonal().argsort(descending=True, stable=True)
        factor = inverse_factor(seen.gram, order, matrix.module, STRONG_DAMP)
        return in_codes(weight, factor, order, self.dtype)


def in_codes(
    weight: Tensor, factor: Tensor, order: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[out, in] in E4M3 and scales [out, 1]; the upper factor [in, in] is in `order`."""
    scale = row_scales(weight, dtype)
    flat = scale.flatten().float()
    columns = weight.t()[order].contiguous()  # [in, out]: a column is a row here
    codes = torch.empty_like(columns, dtype=torch.float8_e4m3fn)

    def settle(j: int) -> Tensor:
        codes[j] = to_codes(columns[j], flat)
        return codes[j].float() * flat

    in_turn(columns, factor, settle)
    return codes[order.argsort()].t().contiguous(), scale

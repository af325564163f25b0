"""FP8: weights as eight-bit floats (E4M3), one scale an output.

Inputs are rounded token by token when the model runs, or with one scale that calibration found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.layouts import compressed
from quire.compress.passes.recipe import Kept, Pass, Recipe, scale_dtype
from quire.compress.seen import Needs, Seen

MOST = torch.finfo(torch.float8_e4m3fn).max
TINIEST = 1e-12  # of what is divided by


class Fp8(Pass):
    widths = (8,)
    takes = ("static_inputs",)

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.dtype = scale_dtype(dtype)
        self.is_static = recipe.static_inputs
        self.needs = Needs(rows=True) if self.is_static else Needs()

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        scale = weight.abs().amax(1, keepdim=True).clamp(min=TINIEST) / MOST
        scale = scale.to(self.dtype)
        packed = (weight / scale.float()).clamp(-MOST, MOST).to(torch.float8_e4m3fn)
        found = {"weight": packed, "weight_scale": scale}
        if self.is_static:
            assert seen is not None
            found["input_scale"] = (seen.most.max().clamp(min=TINIEST) / MOST).reshape(1)
        return found

    def said(self, kept: Kept) -> dict[str, object]:
        inputs: dict[str, object] = {"num_bits": 8, "type": "float"}
        if self.is_static:
            inputs |= {"strategy": "tensor", "dynamic": False, "symmetric": True}
        else:
            inputs |= compressed.DYNAMIC_TOKEN
        weights = compressed.float_weights(8, "channel")
        return compressed.said("float-quantized", weights, inputs, list(kept.modules))

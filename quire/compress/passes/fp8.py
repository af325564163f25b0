"""FP8: weights as the nearest eight-bit floats (E4M3), one scale an output.

Inputs are rounded token by token when the model runs, or with one scale that calibration found.
"""

from __future__ import annotations

from typing import ClassVar

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
    takes: ClassVar[tuple[str, ...]] = ("static_inputs",)

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.dtype = scale_dtype(dtype)
        self.is_static = recipe.static_inputs
        self.needs = Needs(rows=True) if self.is_static else Needs()

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        packed, scale = self.codes(matrix, block, seen)
        found = {"weight": packed, "weight_scale": scale}
        if self.is_static:
            assert seen is not None
            found["input_scale"] = (seen.most.max().clamp(min=TINIEST) / MOST).reshape(1)
        return found

    def codes(
        self, matrix: Matrix, block: BlockTensors, seen: Seen | None
    ) -> tuple[Tensor, Tensor]:
        """[out, in] in E4M3, and the scales of its rows [out, 1]."""
        weight = block.tensors[matrix.name]
        scale = row_scales(weight, self.dtype)
        return to_codes(weight, scale.float()), scale

    def said(self, kept: Kept) -> dict[str, object]:
        inputs: dict[str, object] = {"num_bits": 8, "type": "float"}
        if self.is_static:
            inputs |= {"strategy": "tensor", "dynamic": False, "symmetric": True}
        else:
            inputs |= compressed.DYNAMIC_TOKEN
        weights = compressed.float_weights(8, "channel")
        return compressed.said("float-quantized", weights, inputs, list(kept.modules))


def row_scales(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[out, 1]: the largest of each row becomes the largest code."""
    return (weight.abs().amax(1, keepdim=True).clamp(min=TINIEST) / MOST).to(dtype)


def to_codes(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-MOST, MOST).to(torch.float8_e4m3fn)

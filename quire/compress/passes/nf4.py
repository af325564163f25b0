"""NF4: four-bit codes of values that are equally likely under a normal distribution.

bitsandbytes' layout without nested scales: 64 weights in a row share an fp32 scale, their largest
magnitude. What each tensor holds is told in `load/bitsandbytes.py`, its reader.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.layouts.words import to_bytes
from quire.compress.passes.recipe import Kept, Pass, Recipe
from quire.compress.seen import Seen
from quire.errors import NotSupported

BLOCK = 64
# As the package has them: quantiles of the normal distribution, 0 among them, scaled to -1 and 1.
VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Nf4(Pass):
    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.dtype = str(dtype).removeprefix("torch.")

    def check(self, module: str, shape: tuple[int, int]) -> None:
        if shape[0] * shape[1] % BLOCK:
            raise NotSupported(
                f"{module} has {shape[0]} by {shape[1]} weights, NF4 wants a multiple of {BLOCK};"
                " name it in --keep"
            )

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        values = torch.tensor(VALUES, device=weight.device)
        split = weight.reshape(-1, BLOCK)
        most = split.abs().amax(1, keepdim=True)
        near = torch.bucketize(split / most.clamp(min=1e-30), (values[1:] + values[:-1]) / 2)
        pairs = near.byte().view(-1, 2).flip(1)  # the first is in the high bits
        state = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": self.dtype,
            "shape": list(weight.shape),
        }
        return {
            "weight": to_bytes(pairs.reshape(1, -1), 4).view(-1, 1),
            "weight.absmax": most.flatten(),
            "weight.quant_map": values,
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(
                list(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }

    def said(self, kept: Kept) -> dict[str, object]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": self.dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(kept.modules),
        }

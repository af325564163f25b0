"""Weights of eight-bit floats with their scales: one for all, one a row, or one a block.

Which of these it is, is told by the shape of the scales. Scales multiply. How inputs are rounded is
the activation scheme's to say; a scale that was found beforehand is a tensor beside the weight.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.module import FLOATS, Module
from quire.load.unpack import Piece
from quire.quant.scaled import Scaled, ceil
from quire.quant.weight import Inputs

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EXPONENTS = torch.uint8  # of two, plus 127
POWERS = torch.float8_e8m0fnu  # the same as a dtype
BIAS = 127
INPUT_SCALES = ("input_scale", "activation_scale")


def float8_piece(
    module: Module, scale: str, block: tuple[int, int] | None = None, inputs: Inputs = "float"
) -> Piece:
    """`weight` with `scale` beside it; `block`: outputs and inputs of a scale, where scales are
    neither one for all nor one a row. Checked by headers. Raises CheckpointError."""
    num_out, num_in = module.matrix("weight", *FP8)
    grids = {(num_out, num_in): (1, 1), (1, num_in): (num_out, 1)}  # by block
    if block is not None:
        block = (min(block[0], num_out), min(block[1], num_in))
        grids[block] = (ceil(num_out, block[0]), ceil(num_in, block[1]))
    shape = _without_ones(module.shape(scale))
    chosen = next((b for b, grid in grids.items() if _without_ones(grid) == shape), None)
    if chosen is None:
        raise module.error(scale, f"as many as {' or '.join(map(str, grids.values()))}")
    if module.dtype(scale) not in (*FLOATS, EXPONENTS, POWERS):
        raise module.error(scale, "numbers that weights are multiplied with")
    pack = partial(_weight, module, scale, chosen, grids[chosen], inputs)
    return Piece((num_out, num_in), lambda: pack().dequantize(), pack)


def _weight(
    module: Module,
    last: str,
    block: tuple[int, int],
    grid: tuple[int, int],
    inputs: Inputs,
) -> Scaled:
    stored = module.read(last)
    scales = powers(stored, module.path(last)) if stored.dtype is EXPONENTS else module.scales(last)
    scale = _input_scale(module) if inputs == "fp8-one" else None
    return Scaled(module.read("weight"), scales.float().reshape(grid), block, inputs, scale)


def static_inputs(module: Module) -> Inputs:
    """Rounded by the scale that was found beforehand; row by row where none was stored."""
    return "fp8-one" if any(module.has(last) for last in INPUT_SCALES) else "fp8-row"


def _input_scale(module: Module) -> float:
    """Raises CheckpointError."""
    last = next(last for last in INPUT_SCALES if module.has(last))
    found = module.scales(last).float()
    if found.numel() != 1 or found.item() <= 0.0:
        raise module.error(last, "one number above zero")
    return found.item()


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def powers(exponents: Tensor, name: str) -> Tensor:
    """uint8 -> the powers of two they stand for, fp32. Raises CheckpointError."""
    if bool((exponents == 255).any()):
        raise CheckpointError(f"tensor {name} has 255 among its exponents, which is no number")
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - BIAS)

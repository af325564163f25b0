"""Weights of four-bit floats (E2M1), two to a byte with the first in the low bits.

NVFP4 has an eight-bit float for every 16 inputs and one fp32 for all, which some writers divide by
and others multiply with. MXFP4 has a power of two for every 32 inputs (`mxfp4.py`).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.floats8 import POWERS
from quire.load.module import Module
from quire.load.mxfp4 import BLOCK, BYTES, dequantize, mxfp4_codes
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.quant.coded import Coded
from quire.quant.load_forms import E2M1_TABLE
from quire.quant.weight import Weight

NV_BLOCK = 16
_MOST = 0x7E  # the largest E4M3
_LEAST_FACTOR = 2.0**-60


def nvfp4_piece(module: Module, last: str, whole: str, divides: bool) -> Piece:
    """`last`: the codes; `whole`: the scale of all, beside `weight_scale`. Checked by headers.
    Raises CheckpointError."""
    num_out, num_bytes = module.matrix(last, torch.uint8)
    if num_bytes * 2 % NV_BLOCK:
        raise module.error(last, f"a multiple of {NV_BLOCK // 2} bytes a row")
    num_in = num_bytes * 2
    module.check("weight_scale", (num_out, num_in // NV_BLOCK), torch.float8_e4m3fn)
    if torch.Size(module.shape(whole)).numel() != 1 or module.dtype(whole) is not torch.float32:
        raise module.error(whole, "one float32")
    pack = partial(_nvfp4, module, last, whole, divides)
    return Piece((num_out, num_in), lambda: pack().dequantize(), pack)


def _nvfp4(module: Module, last: str, whole: str, divides: bool) -> Coded:
    words, factor = module.read(last), module.scales(whole).reshape(())
    if divides and not bool(factor > 0):
        raise CheckpointError(f"tensor {module.path(whole)} is {factor.item()}, want more than 0")
    eighths = module.read("weight_scale")
    module.demand_finite("weight_scale", eighths.float())
    codes = dense_codes(words, 4, words.shape[1] * 2)
    # The table's values are doubled, so scales are halved.
    if not _can_stay(eighths, factor):
        scales = eighths.float() / factor if divides else eighths.float() * factor
        module.demand_finite(whole, scales)  # the scale of all may be far too small, or too large
        return Coded(codes, 4, NV_BLOCK, scales * 0.5, table=E2M1_TABLE)
    above = factor * 2 if divides else factor * 0.5
    return Coded(
        *(codes, 4, NV_BLOCK, eighths.view(torch.uint8)),
        super_scales=above.repeat(len(codes), 1),
        table=E2M1_TABLE,
        eighths="over" if divides else "times",
    )


def _can_stay(eighths: Tensor, factor: Tensor) -> bool:
    """Whether kernels may divide by the scale of all as they do: no scale has a sign, and nothing
    comes near the end of fp32's range."""
    is_plain = bool((eighths.view(torch.uint8) <= _MOST).all())
    return is_plain and _LEAST_FACTOR <= float(factor) <= 1 / _LEAST_FACTOR


def mxfp4_piece(module: Module, last: str) -> Piece:
    """`last`: the codes, beside `weight_scale`. Checked by headers. Raises CheckpointError."""
    num_out, num_bytes = module.matrix(last, torch.uint8)
    if num_bytes % BYTES:
        raise module.error(last, f"a multiple of {BYTES} bytes a row")
    module.check("weight_scale", (num_out, num_bytes // BYTES), torch.uint8, POWERS)

    def make() -> Tensor:
        return dequantize(*_mxfp4(module, last), module.path(last))

    def pack() -> Weight | None:
        return mxfp4_codes(*_mxfp4(module, last), module.path(last))

    return Piece((num_out, num_bytes // BYTES * BLOCK), make, pack)


def _mxfp4(module: Module, last: str) -> tuple[Tensor, Tensor]:
    words = module.read(last)
    return words.view(len(words), -1, BYTES), module.read("weight_scale").view(torch.uint8)

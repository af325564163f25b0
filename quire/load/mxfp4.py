"""From MXFP4 to bfloat16: sixteen values of four bits, and one power of two for every 32 weights.

The format of the Open Compute Project's microscaling specification: E2M1 numbers, two to a byte
with the first in the low bits, and an E8M0 scale, a bare exponent. Every result is exact: two
significant bits times a power of two fit bfloat16 as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.quant.coded import Coded
from quire.quant.load_forms import E2M1_TABLE

BLOCK = 32  # weights that share a scale
BYTES = BLOCK // 2
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the scales' exponent
_NO_NUMBER = 255
_RUN = 1 << 22  # weights made at once: what lies between stays in cache


def dequantize(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """uint8 [..., groups, 16] and [..., groups] -> bfloat16 [..., groups * 32]. Raises
    CheckpointError.

    >>> ones = torch.full((1, 16), 0x22, dtype=torch.uint8)
    >>> dequantize(ones, torch.tensor([130], dtype=torch.uint8), "w")[0].item()
    8.0
    """
    _check(blocks, scales, name)
    pairs, powers = _pairs().to(blocks.device), _powers().to(blocks.device)
    packed, exponents = blocks.reshape(-1, BYTES), scales.reshape(-1)
    out = torch.empty(len(packed), BLOCK, dtype=torch.bfloat16, device=blocks.device)
    for start in range(0, len(packed), _RUN // BLOCK):
        rows = slice(start, start + _RUN // BLOCK)
        made = pairs.index_select(0, packed[rows].reshape(-1).int()).view(torch.bfloat16)
        scale = powers.index_select(0, exponents[rows].int())
        torch.mul(made.view(-1, BLOCK), scale.unsqueeze(1), out=out[rows])
    return out.view(*scales.shape[:-1], -1)


def mxfp4_codes(blocks: Tensor, scales: Tensor, name: str) -> Coded:
    """uint8 [out, groups, 16] and [out, groups] as codes of a table. Raises CheckpointError."""
    _check(blocks, scales, name)
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1)  # the low one is the first
    codes = nibbles.view(len(blocks), -1)
    # Values of the table are doubled: 2**(e - 127) of theirs is 2**(e - 128) of these.
    return Coded(codes, 4, BLOCK, scales.contiguous(), table=E2M1_TABLE, are_powers=True)


def _check(blocks: Tensor, scales: Tensor, name: str) -> None:
    want = (*scales.shape, BYTES)
    if blocks.shape != want or not blocks.dtype == scales.dtype == torch.uint8:
        raise CheckpointError(
            f"tensor {name}: got {blocks.dtype} blocks {tuple(blocks.shape)} with {scales.dtype}"
            f" scales {tuple(scales.shape)}, want torch.uint8 and blocks {want}"
        )
    if bool((scales == _NO_NUMBER).any()):
        raise CheckpointError(
            f"tensor {name}: got {_NO_NUMBER} among the exponents of its scales, which stands for"
            " no number; the file is damaged, or was written from weights that were no numbers"
        )


def _pairs() -> Tensor:
    """[256] int32: the two bfloat16 values of each byte, side by side."""
    values = torch.tensor(_POSITIVE + tuple(-v for v in _POSITIVE), dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int32).view(-1)


def _powers() -> Tensor:
    """[255] bfloat16: what each scale multiplies by."""
    return torch.ldexp(torch.ones(_NO_NUMBER), torch.arange(_NO_NUMBER) - _BIAS).bfloat16()

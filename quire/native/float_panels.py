"""Weights of eight-bit floats, and of 16 values by number, as panels: floats with scales.

An input of 16 outputs is 16 bytes, or half of that. Products have the bits of those with the same
weights expanded to fp32, in a quarter or an eighth of the memory. `src/floats.h` is the other side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.quant.codebook import Codebook
from quire.quant.scaled import Scaled

PANEL = 16
EIGHT_BITS = {torch.float8_e4m3fn: 103, torch.float8_e5m2: 104}
VALUES4 = 105
NAMES = {103: "8 bits E4M3", 104: "8 bits E5M2", VALUES4: "4 bits by 16 values"}
BY_LANE, BY_PANEL = 1, 5  # kinds of scales

FloatPanels = tuple[tuple[Tensor | None, ...], tuple[int, ...]]  # tensors, and the shape


def can_be_float_panels(weight: object) -> bool:
    if isinstance(weight, Codebook):
        return weight.inputs != "int8-row"
    if not isinstance(weight, Scaled) or weight.inputs == "int8-row":
        return False
    # What is no number has a code of its own, which kernels do not know.
    return weight.tensor.dtype in EIGHT_BITS and bool(weight.tensor.half().isfinite().all())


def pack_scaled(weight: Scaled, bias: Tensor | None) -> FloatPanels:
    num_out, num_in = weight.shape
    codes = _padded(weight.tensor.view(torch.uint8))
    panels = codes.view(-1, PANEL, num_in).transpose(1, 2).contiguous()
    height, width = weight.block
    if height % PANEL == 0 or height >= num_out:  # a panel has one scale
        kind = BY_PANEL
        first = torch.arange(0, len(codes), PANEL) // height
        scales = weight.scales[first].contiguous()  # [panels, groups]
    else:
        kind, scales = BY_LANE, _by_panel(weight.by_row())
    share = min(width, num_in)
    tensors = (panels, scales, None, None, None, None, bias, None, None)
    return tensors, (num_out, num_in, EIGHT_BITS[weight.tensor.dtype], 1, 0, kind, 1, share, 0)


def pack_codebook(weight: Codebook, bias: Tensor | None) -> FloatPanels:
    num_out, num_in = weight.shape
    codes = F.pad(_padded(weight.codes), (0, num_in % 2))
    pairs = codes.view(-1, PANEL, (num_in + 1) // 2, 2)
    panels = (pairs[..., 0] | pairs[..., 1] << 4).transpose(1, 2).contiguous()
    values = torch.tensor(weight.values, dtype=torch.float32)
    tensors = (panels, _by_panel(weight.scales), None, None, None, None, bias, values, None)
    return tensors, (num_out, num_in, VALUES4, 1, 0, BY_LANE, 1, weight.block, 0)


def _by_panel(scales: Tensor) -> Tensor:
    """[out, groups] -> [panels, groups, 16] fp32."""
    return _padded(scales.float()).view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % PANEL
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows

"""Weights of which every four inputs keep two, as panels: values, and the places they are for.

Eight inputs of 16 outputs are 144 bytes, where plain floats of 16 bits take 256. Products have the
bits of those with the zeros written out. `src/sparse.h` is the other side.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.native.float_panels import FloatPanels
from quire.quant.sparse24 import Sparse24

PANEL = 16
CODES = {torch.float16: 106, torch.bfloat16: 107}
NAMES = {106: "float16 2:4", 107: "bfloat16 2:4"}


def can_be_sparse_panels(weight: object) -> bool:
    return (
        isinstance(weight, Sparse24)
        and weight.values.dtype in CODES
        and weight.inputs == "float"
        and weight.shape[1] % 8 == 0
    )


def pack_sparse(weight: Sparse24, bias: Tensor | None) -> FloatPanels:
    num_out, num_in = weight.shape
    missing = -num_out % PANEL
    values = F.pad(weight.values, (0, 0, 0, missing)).view(-1, PANEL, num_in // 8, 4)
    values = values.permute(0, 2, 3, 1).contiguous().view(torch.uint8)  # [panels, eights, 4, 32]
    pairs = F.pad(weight.places, (0, 0, 0, missing)).view(-1, PANEL, num_in // 8, 2)
    places = (pairs[..., 0] | pairs[..., 1] << 4).transpose(1, 2)  # [panels, eights, 16]
    panels = torch.cat((values.flatten(2), places), 2).contiguous()
    tensors = (panels, None, None, None, None, None, bias, None, None)
    return tensors, (num_out, num_in, CODES[weight.values.dtype], 1, 0, 1, 1, 1, 0)

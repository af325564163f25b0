"""PackedLinear: fp32 products through MKL, for CPUs where nothing of our own can be compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedLinear:
    """MKL's packed sgemm. The packing does not depend on the batch, so one serves all sizes.

    The last rows of a batch, when they do not fill a tile of the library, take another path in it
    and get other bits (which counts do so depends on the CPU and the number of threads). So the
    library only ever sees whole tiles: the batch is padded to a multiple of ROW_TILE rows, and
    the weight once to a multiple of COLUMN_TILE outputs. That costs little where reading the
    weight is the cost.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out = weight.shape[0]
        missing = -self.num_out % COLUMN_TILE
        if missing:
            weight = F.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACK_HINT)
        # The op reads only the sizes of the original weight: a stride-0 stand-in frees its bytes.
        self.shape_of = weight.new_empty(1, 1).expand(weight.shape)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % ROW_TILE
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        out: Tensor = torch.ops.mkl._mkl_linear(
            x, self.packed, self.shape_of, self.bias, x.shape[0]
        )
        return out[:num_rows, : self.num_out]


ROW_TILE = 24  # rows; the least multiple that gave equal bits on every CPU tried, Intel and AMD
COLUMN_TILE = 64  # outputs
PACK_HINT = 32  # rows MKL is told to expect; results do not depend on it


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )

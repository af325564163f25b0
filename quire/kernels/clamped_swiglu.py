"""The gate of gpt-oss's experts on the device: (up + 1) * gate * sigmoid(alpha * gate), clamped.

Elementwise, so batch shape cannot change a bit. In f32 throughout, rounded once at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher

__all__ = ["clamped_swiglu"]

BLOCK = 1024


@triton.jit
def _clamped_swiglu_kernel(gate_up, out, width, alpha, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=keep, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    share = 1.0 / (1.0 + tl.exp(-alpha * gate))
    tl.store(
        out + row * width + cols, ((up + 1.0) * (gate * share)).to(out.dtype.element_ty), mask=keep
    )


_launch = Launcher(_clamped_swiglu_kernel)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """[rows, 2 * width] -> [rows, width]."""
    assert gate_up.ndim == 2 and gate_up.is_contiguous(), f"{gate_up.shape=} {gate_up.stride()=}"
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _launch(
            (rows, triton.cdiv(width, BLOCK), 1),
            (gate_up, out, width, alpha, limit),
            {"BLOCK": BLOCK, "num_warps": 4},
            (gate_up.dtype, width, gate_up.data_ptr() % 16 == 0),
        )
    return out

"""The gate of a gated MLP: silu of the first half of each row times the second half, or another
activation in silu's place.

Elementwise, so batch shape cannot change a bit. Rounds the activation to the input dtype before
the product, as the unfused modules do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up, out, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < width
    gate = tl.load(gate_up + row * 2 * width + cols, mask=keep, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + cols, mask=keep, other=0.0)
    g = gate.to(tl.float32)
    if ACTIVATION == "relu2":
        # Its unfused module rounds after the ReLU, which changes nothing, and after the square.
        active = tl.maximum(g, 0.0) * tl.maximum(g, 0.0)
    elif ACTIVATION == "gelu":  # x * (1 + tanh(u)) / 2 is x * sigmoid(2 u)
        active = g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    else:
        active = g / (1.0 + tl.exp(-g))
    active = active.to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + cols, (active * up.to(tl.float32)).to(gate.dtype), mask=keep)


_launch = Launcher(_silu_mul_kernel)


def silu_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """[tokens, 2 * width] -> [tokens, width]; `activation` as in ModelSpec."""
    assert activation in ("silu", "gelu", "relu2"), f"{activation=}"
    assert gate_up.ndim == 2 and gate_up.is_contiguous(), f"{gate_up.shape=} {gate_up.stride()=}"
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _launch(
            (tokens, triton.cdiv(width, BLOCK), 1),
            (gate_up, out, width),
            {"BLOCK": BLOCK, "ACTIVATION": activation, "num_warps": 4},
            (gate_up.dtype, width, gate_up.data_ptr() % 16 == 0),
        )
    return out

"""The gate of a gated MLP: an activation (silu by default) of the first half of each row, times the
second half.

Elementwise, so batch shape cannot change a bit. Rounds the activation to the input dtype before
the product, as the unfused modules do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, ceil_div

BLOCK = 1024


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The gate through its activation, rounded to its dtype, in fp32."""
    g = gate.to(tl.float32)
    if ACTIVATION == "relu2":
        # Its unfused module rounds after the ReLU, which changes nothing, and after the square.
        active = tl.maximum(g, 0.0) * tl.maximum(g, 0.0)
    elif ACTIVATION == "gelu":  # x * (1 + tanh(u)) / 2 is x * sigmoid(2 u)
        active = g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    else:
        active = g / (1.0 + tl.exp(-g))
    return active.to(gate.dtype).to(tl.float32)


@triton.jit
def _silu_mul_kernel(
    gate_up,
    out,
    width,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = cols < width
    if INTERLEAVED:
        # A pair of halves is one 32-bit word: loads stay wide, and no lane needs its neighbour's.
        words = tl.load(gate_up.to(tl.pointer_type(tl.uint32)) + row * width + cols, mask=keep)
        gate = (words & 0xFFFF).to(tl.uint16).to(out.dtype.element_ty, bitcast=True)
        up = (words >> 16).to(tl.uint16).to(out.dtype.element_ty, bitcast=True)
    else:
        gate = tl.load(gate_up + row * 2 * width + cols, mask=keep, other=0.0)
        up = tl.load(gate_up + row * 2 * width + width + cols, mask=keep, other=0.0)
    active = activated(gate, ACTIVATION)
    tl.store(out + row * width + cols, (active * up.to(tl.float32)).to(gate.dtype), mask=keep)


_launch = Launcher(_silu_mul_kernel)


@cache
def _constants(activation: str, interleaved: bool) -> Mapping[str, object]:
    return {
        "BLOCK": BLOCK,
        "ACTIVATION": activation,
        "INTERLEAVED": interleaved,
        **early_options(),
        "num_warps": 4,
    }


def silu_mul(gate_up: Tensor, activation: str = "silu", interleaved: bool = False) -> Tensor:
    """[tokens, 2 * width] -> [tokens, width]; the input is all gates, then all ups, or pairs.
    `activation` as in ModelSpec."""
    assert activation in ("silu", "gelu", "relu2"), f"{activation=}"
    assert gate_up.ndim == 2 and gate_up.is_contiguous(), f"{gate_up.shape=} {gate_up.stride()=}"
    assert not interleaved or gate_up.element_size() == 2, f"pairs of halves, not {gate_up.dtype}"
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _launch(
            (tokens, ceil_div(width, BLOCK), 1),
            (gate_up, out, width),
            _constants(activation, interleaved),
            (gate_up.dtype, width, gate_up.data_ptr() % 16 == 0),
        )
    return out

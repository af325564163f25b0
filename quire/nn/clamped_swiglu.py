"""The gate of gpt-oss's experts: (up + 1) * gate * sigmoid(alpha * gate), both clamped first.

Gates are clamped from above only, ups from both sides. Computed in f32 whatever the dtype and
rounded once. A row's bits do not depend on the batch; the plain gate is `gate.py`'s `silu_mul`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.nn.gate import MAX_SERIAL


def clamped_swiglu(gate_up: Tensor, /, *, alpha: float, limit: float) -> Tensor:
    """[rows, 2 * ffn] gate | up -> [rows, ffn]."""
    if gate_up.is_cuda:
        from quire.kernels.clamped_swiglu import clamped_swiglu as kernel

        return kernel(gate_up, alpha, limit)
    half = gate_up.shape[-1] // 2
    values = gate_up.float()
    gate = values.clamp(max=limit)
    up = values[:, half:].clamp(-limit, limit)
    # Scaled at full width, so that the half taken from it keeps its stride: exponentials then go
    # row by row. Pieces stay below what threads would split inside a row (see `silu_mul`).
    scaled = (gate * alpha)[:, :half]
    pieces = [torch.sigmoid(piece) for piece in scaled.split(max(1, (MAX_SERIAL - 1) // half))]
    share = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return ((up + 1.0) * (gate[:, :half] * share)).to(gate_up.dtype)

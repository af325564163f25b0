"""The gate of a gated feed-forward block: silu of one half times the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SERIAL = 32768  # torch's grain size


def silu_mul(x: Tensor) -> Tensor:
    """[tokens, 2 * ffn] gate | up -> silu(gate) * up."""
    if x.is_cuda:
        from quire.kernels.silu_mul import silu_mul as kernel

        return kernel(x)
    half = x.shape[-1] // 2
    # A piece of more elements is split between threads inside a row, and the ends of a split go
    # through another exp: a row's bits would depend on its place in the batch.
    rows = max(1, (MAX_SERIAL - 1) // half)
    if len(x) <= rows:
        return F.silu(x[:, :half]) * x[:, half:]
    return torch.cat([F.silu(piece[:, :half]) for piece in x.split(rows)]) * x[:, half:]

"""The gate of a gated feed-forward block: one half through its activation, times the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.native.tape import Rows

MAX_SERIAL = 32768  # torch's grain size


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": _gelu,
    "relu2": _relu2,
}


def silu_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """[tokens, 2 * ffn] gate | up -> silu(gate) * up, or another activation's."""
    if isinstance(x, Rows):
        return x.tape.gate(x, activation)
    if x.is_cuda:
        from quire.kernels.silu_mul import silu_mul as kernel

        return kernel(x, activation)
    act = ACTIVATIONS[activation]
    half = x.shape[-1] // 2
    # A piece of more elements is split between threads inside a row, and the ends of a split go
    # through another exp: a row's bits would depend on its place in the batch.
    rows = max(1, (MAX_SERIAL - 1) // half)
    if len(x) <= rows:
        return act(x[:, :half]) * x[:, half:]
    return torch.cat([act(piece[:, :half]) for piece in x.split(rows)]) * x[:, half:]

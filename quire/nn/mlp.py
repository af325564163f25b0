"""The two feed-forward blocks: gated (Llama and kin) and plain (GPT-2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.spec import ModelSpec
from quire.nn.linear import Linear


class GatedMLP:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        parts = {"gate": spec.ffn_size, "up": spec.ffn_size}
        self.up = Linear(spec.hidden_size, parts, bias=spec.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(
            spec.ffn_size,
            {"down": spec.hidden_size},
            bias=spec.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.up(x)))


class PlainMLP:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.up = Linear(
            spec.hidden_size, {"up": spec.ffn_size}, bias=spec.mlp_bias, dtype=dtype, device=device
        )
        self.down = Linear(
            spec.ffn_size,
            {"down": spec.hidden_size},
            bias=spec.mlp_bias,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def silu_mul(x: Tensor) -> Tensor:
    """[tokens, 2 * ffn] gate | up -> silu(gate) * up."""
    if x.is_cuda:
        from quire.kernels.silu_mul import silu_mul as kernel

        return kernel(x)
    half = x.shape[-1] // 2
    return F.silu(x[:, :half]) * x[:, half:]

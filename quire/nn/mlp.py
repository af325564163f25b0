"""The feed-forward block: gated (Llama and kin) or plain (GPT-2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.spec import ModelSpec
from quire.nn.linear import KernelChoice, Linear


class MLP:
    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, ffn_size: int | None = None
    ) -> None:
        """`ffn_size` for a block of another width than the model's (a shared expert)."""
        hidden, ffn, bias = spec.hidden_size, ffn_size or spec.ffn_size, spec.mlp_bias
        self.is_gated = spec.mlp == "gated"
        parts = {"gate": ffn, "up": ffn} if self.is_gated else {"up": ffn}
        self.up = Linear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(ffn, {"down": hidden}, bias=bias, dtype=dtype, device=device)

    def linears(self) -> dict[str, Linear]:
        return {"up": self.up, "down": self.down}

    def finish(self, choose: KernelChoice) -> None:
        for linear in self.linears().values():
            linear.finish(choose)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.up(x)  # [tokens, 2 * ffn] or [tokens, ffn]
        x = silu_mul(x) if self.is_gated else F.gelu(x, approximate="tanh")
        return self.down(x)


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


MAX_SERIAL = 32768  # torch's grain size

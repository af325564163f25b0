"""The feed-forward block: gated (Llama and kin) or plain (GPT-2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.spec import ModelSpec
from quire.nn.linear import KernelChoice, Linear
from quire.nn.norm import RMSNorm


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
        self.activation = spec.activation
        self.sub_norm = None
        if spec.sub_norms:
            self.sub_norm = RMSNorm(ffn, spec.norm_eps, dtype, device, spec.norm_offset)

    def linears(self) -> dict[str, Linear]:
        return {"up": self.up, "down": self.down}

    def norms(self) -> dict[str, RMSNorm]:
        return {} if self.sub_norm is None else {"mlp_sub_norm": self.sub_norm}

    def finish(self, choose: KernelChoice) -> None:
        for linear in self.linears().values():
            linear.finish(choose)

    def __call__(self, x: Tensor) -> Tensor:
        x = self.up(x)  # [tokens, 2 * ffn] or [tokens, ffn]
        x = silu_mul(x, self.activation) if self.is_gated else F.gelu(x, approximate="tanh")
        if self.sub_norm is not None:
            x, _ = self.sub_norm(x, None)
        return self.down(x)


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


MAX_SERIAL = 32768  # torch's grain size

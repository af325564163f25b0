"""Attention layer: project, hand over to the backend, project back."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform
from quire.forward import ForwardContext
from quire.models.spec import ModelSpec
from quire.nn.linear import Linear


class Attention:
    def __init__(
        self, spec: ModelSpec, heads: AttnSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        dim = spec.head_dim
        parts = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim}
        parts["v"] = parts["k"]
        self.heads = heads
        self.qkv = Linear(spec.hidden_size, parts, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(
            parts["q"],
            {"out": spec.hidden_size},
            bias=spec.out_bias,
            dtype=dtype,
            device=device,
        )
        self.q_norm = torch.empty(dim, dtype=dtype, device=device) if spec.qk_norm else None
        self.k_norm = torch.empty(dim, dtype=dtype, device=device) if spec.qk_norm else None
        self.eps = spec.norm_eps
        self.transform: HeadTransform | None = None

    def finish(self, cos: Tensor | None, sin: Tensor | None) -> None:
        self.transform = HeadTransform(cos, sin, self.q_norm, self.k_norm, self.eps)

    def __call__(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
        assert self.transform is not None, "Attention used before finish()"
        cache = ctx.pool.layer(layer)
        qkv = self.qkv(x)  # [tokens, (H + 2 Hkv) * D]
        q = ctx.attention.prepare(qkv, self.transform, cache, ctx.attn_plan, self.heads)
        y = ctx.attention.run(q, cache, ctx.attn_plan, self.heads)  # [tokens, H, D]
        return self.out(y.reshape(y.shape[0], -1))

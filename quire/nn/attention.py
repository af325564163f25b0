"""Attention layer: project, hand over to the backend, project back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform
from quire.forward import ForwardContext
from quire.models.spec import ModelSpec
from quire.nn.linear import Linear
from quire.nn.norm import RMSNorm


class Attention:
    def __init__(
        self, spec: ModelSpec, heads: AttnSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        dim = spec.head_dim
        parts = {"q": spec.num_heads * dim, "k": spec.num_kv_heads * dim}
        parts["v"] = parts["k"]
        self.heads = heads if spec.attn_scale is None else replace(heads, scale=spec.attn_scale)
        self.qkv = Linear(spec.hidden_size, parts, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(
            parts["q"],
            {"out": spec.hidden_size},
            bias=spec.out_bias,
            dtype=dtype,
            device=device,
        )
        self.is_wide = spec.qk_norm == "width"
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            widths = (parts["q"], parts["k"]) if self.is_wide else (dim, dim)
            self.q_norm, self.k_norm = (
                RMSNorm(width, spec.norm_eps, dtype, device) for width in widths
            )
        self.eps = spec.norm_eps
        self.transform: HeadTransform | None = None

    def finish(self, cos: Tensor | None, sin: Tensor | None) -> None:
        q_norm = k_norm = None  # of each head: the backend's work
        if self.q_norm is not None and self.k_norm is not None and not self.is_wide:
            q_norm, k_norm = self.q_norm.weight, self.k_norm.weight
        self.transform = HeadTransform(cos, sin, q_norm, k_norm, self.eps)

    def __call__(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
        assert self.transform is not None, "Attention used before finish()"
        cache = ctx.pool.layer(layer)
        qkv = self.qkv(x)  # [tokens, (H + 2 Hkv) * D]
        if self.is_wide:
            qkv = self._norm_wide(qkv)
        q = ctx.attention.prepare(qkv, self.transform, cache, ctx.attn_plan, self.heads)
        y = ctx.attention.run(q, cache, ctx.attn_plan, self.heads)  # [tokens, H, D]
        return self.out(y.reshape(y.shape[0], -1))

    def _norm_wide(self, qkv: Tensor) -> Tensor:
        """q and k normed over all their heads at once."""
        assert self.q_norm is not None and self.k_norm is not None
        q, k, v = qkv.split(list(self.qkv.parts.values()), dim=1)
        # Contiguous, as a lone row would be anyway: strides must not choose the library's path.
        q, _ = self.q_norm(q.contiguous(), None)
        k, _ = self.k_norm(k.contiguous(), None)
        return torch.cat((q, k, v), dim=1)

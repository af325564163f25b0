"""MlaAttention: a layer whose cache is one latent per token (DeepSeek).

Queries may be squeezed through a latent of their own first. Keys and values are products of the
cached latent (`kv_b`). Where a token's form is absorbed (`attn/latent.py`), this layer applies them
to queries and results; where it is expanded, to the pages. Rotated dimensions are stored
half-split, so checkpoints that interleave pairs are permuted once, in `finish`. `store` and
`attend` are as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.latent import (
    LatentAttention,
    LatentPlan,
    Projected,
    latent_attention,
    latent_plan,
)
from quire.dist.cuts import Cut
from quire.dist.ranks import ALONE, Ranks
from quire.forward import LayerContext
from quire.nn.attention import NormedStore, Ropes, normed_store
from quire.nn.linear import Linear
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.ops import HeadProduct, Ops
from quire.nn.parameter import Parameter
from quire.quant.weight import tensor_of

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec

NORM_EPS = 1e-6  # of the latents, whatever the config says of the other norms


class MlaAttention:
    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        assert spec.mla is not None
        self.mla = mla = spec.mla
        own = ranks.heads(spec.num_heads, spec.num_heads).q
        all_heads = ranks.spread_heads(spec.num_heads, spec.num_heads, mla.v_dim)
        self.passage = ranks.passage(all_heads, spec.hidden_size)
        self.num_heads, self.width = own.size, mla.nope_dim + mla.rope_dim
        scale = self.width**-0.5 if spec.attn_scale is None else spec.attn_scale
        self.heads = replace(heads, scale=scale)

        def linear(num_in: int | Cut, parts: Mapping[str, int | Cut], bias: bool = False) -> Linear:
            return Linear(num_in, parts, bias=bias, dtype=dtype, device=device)

        # Latents are for all heads, so every rank makes all of them.
        parts = {"q": mla.q_rank or own.times(self.width), "kv": mla.kv_rank + mla.rope_dim}
        self.qkv = linear(spec.hidden_size, parts, spec.qkv_bias)
        self.q_b: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if mla.q_rank is not None:
            self.q_norm = RMSNorm(mla.q_rank, NORM_EPS, dtype, device)
            self.q_b = linear(mla.q_rank, {"q": own.times(self.width)})
        self.kv_norm = RMSNorm(mla.kv_rank, NORM_EPS, dtype, device)
        self.kv_b = linear(mla.kv_rank, {"kv": own.times(mla.nope_dim + mla.v_dim)})
        out, has_bias = {"out": self.passage.made}, spec.out_bias and self.passage.has_bias
        self.out = linear(self.passage.taken, out, has_bias)
        self.to_latent: HeadProduct | None = None
        self.to_value: HeadProduct | None = None
        self.transform: HeadTransform | None = None

    def linears(self) -> dict[str, Linear]:
        found = {"qkv": self.qkv, "q_b": self.q_b, "kv_b": self.kv_b, "out": self.out}
        return {name: linear for name, linear in found.items() if linear is not None}

    def norms(self) -> dict[str, RMSNorm]:
        found = {"q_norm": self.q_norm, "kv_norm": self.kv_norm}
        return {name: norm for name, norm in found.items() if norm is not None}

    def parameters(self) -> dict[str, Parameter]:
        return {}

    def finish(self, ops: Ops, ropes: Ropes) -> None:
        if self.mla.interleaved:
            self._split_halves()
        # In floats: a transposed weight has its scales along the wrong side.
        per_head = tensor_of(self.kv_b.weight.weights()).view(self.num_heads, -1, self.mla.kv_rank)
        keys, values = per_head.split([self.mla.nope_dim, self.mla.v_dim], 1)
        self.to_latent = ops.head_product(keys.transpose(1, 2))
        self.to_value = ops.head_product(values)
        for linear in self.linears().values():
            linear.finish(ops)
        for norm in self.norms().values():
            norm.finish(ops)
        self.transform = HeadTransform(ropes.full.cos, ropes.full.sin, None, None, 0.0)

    def _split_halves(self) -> None:
        """Permute the rotated dims of the weights: pairs (0, 1), (2, 3) become halves 0, 2 | 1, 3.

        Queries and keys are permuted alike, so their products stay the same."""
        mla, width = self.mla, self.width
        turned = _halves(mla.rope_dim)
        head = torch.cat((torch.arange(mla.nope_dim), mla.nope_dim + turned))
        heads = (width * torch.arange(self.num_heads)[:, None] + head).flatten()
        (self.q_b or self.qkv).reorder("q", heads)
        latent = torch.arange(mla.kv_rank)
        self.qkv.reorder("kv", torch.cat((latent, mla.kv_rank + turned)))

    def store(self, x: Tensor, at: LayerContext) -> Tensor:
        """Latents of [tokens, hidden] into the cache; returns queries [tokens, heads, width]."""
        return self._store(self.qkv(x), at)

    def after(self, norm: RMSNorm | LayerNorm) -> NormedStore | None:
        return normed_store(norm.into(self.qkv.kernel), self._store)

    def _store(self, qkv: Tensor, at: LayerContext) -> Tensor:
        assert self.transform is not None, "MlaAttention used before finish()"
        backend, plan = latent_attention(at.attention), latent_plan(at.plan)
        return backend.prepare(self._project(qkv), self.transform, at.cache, plan, self.heads)

    def attend(self, q: Tensor, at: LayerContext) -> Tensor:
        """What the queries read from the cache -> [queries, hidden]."""
        backend, plan, cache = latent_attention(at.attention), latent_plan(at.plan), at.cache
        if plan.expanded is None:
            y = self._absorbed(q, cache, backend, plan)
        elif plan.absorbed is None:
            y = self._expanded(q, cache, backend, plan)
        else:
            y = q.new_empty(len(q), self.num_heads, self.mla.v_dim)
            absorbed, expanded = plan.absorbed, plan.expanded
            assert absorbed.tokens is not None and expanded.tokens is not None
            some = self._absorbed(absorbed.take(q), cache, backend, plan)
            y.index_copy_(0, absorbed.tokens, some)
            others = self._expanded(expanded.take(q), cache, backend, plan)
            y.index_copy_(0, expanded.tokens, others)
        return self.passage.leave(self.out(self.passage.enter(y.flatten(1))))

    def _project(self, qkv: Tensor) -> Projected:
        mla = self.mla
        q, latent, key = qkv.split([self.qkv.parts["q"], mla.kv_rank, mla.rope_dim], 1)
        if self.q_b is not None and self.q_norm is not None:
            q, _ = self.q_norm(q, None)
            q = self.q_b(q)
        latent, _ = self.kv_norm(latent, None)
        return Projected(q.unflatten(1, (self.num_heads, self.width)), latent, key)

    def _absorbed(
        self, q: Tensor, cache: LayerCache, backend: LatentAttention, plan: LatentPlan
    ) -> Tensor:
        assert self.to_latent is not None and self.to_value is not None
        q = self.to_latent(q)  # [tokens, heads, kv_rank + rope]
        return self.to_value(backend.run(q, cache, plan, self.heads))

    def _expanded(
        self, q: Tensor, cache: LayerCache, backend: LatentAttention, plan: LatentPlan
    ) -> Tensor:
        return backend.run_expanded(q, cache, plan, self.heads, self._expand)

    def _expand(self, latents: Tensor) -> Tensor:
        return self.kv_b(latents).view(len(latents), self.num_heads, -1)


def _halves(dim: int) -> Tensor:
    """0, 2, 4, ... | 1, 3, 5, ..."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))

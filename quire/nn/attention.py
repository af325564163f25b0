"""Attention layer: project, hand over to the backend, project back.

It has two halves. `store` puts the step's keys and values into the cache. `attend` takes the
queries of all tokens or, with a plan for them, of some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform
from quire.dist.cuts import Cut
from quire.dist.ranks import ALONE, Ranks
from quire.forward import LayerContext
from quire.models.spec import ModelSpec
from quire.nn.linear import Linear
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.ops import NormedKernel, Ops
from quire.nn.parameter import WHOLE, Kept, Parameter

# (x, residual, context) -> (queries, the stream)
NormedStore = Callable[[Tensor, Tensor | None, LayerContext], tuple[Tensor, Tensor]]


def normed_store(
    kernel: NormedKernel | None, store: Callable[[Tensor, LayerContext], Tensor]
) -> NormedStore | None:
    """`store` of what the kernel of a norm and a product makes, where there is one."""
    if kernel is None:
        return None

    def normed(x: Tensor, residual: Tensor | None, at: LayerContext) -> tuple[Tensor, Tensor]:
        made, stream = kernel(x, residual)
        return store(made, at), stream

    return normed


class RopeTables(NamedTuple):
    """cos and sin, each [positions, dim / 2] f32; None: no rotation."""

    cos: Tensor | None
    sin: Tensor | None


class Ropes(NamedTuple):
    """Rotations of a model's layers: of those that see everything, and of the windowed ones."""

    full: RopeTables
    local: RopeTables


class Attention:
    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        dim = spec.head_dim
        self.own = own = ranks.heads(spec.num_heads, spec.num_kv_heads)
        all_heads = ranks.spread_heads(spec.num_heads, spec.num_kv_heads, dim)
        self.passage = ranks.passage(all_heads, spec.hidden_size, whole=spec.sub_norms)
        self.is_wide = spec.qk_norm == "width"
        parts = {"q": own.q.times(dim), "k": own.kv.times(dim)}
        if self.is_wide:  # every rank norms all heads
            parts = {name: Cut.whole(cut.total) for name, cut in parts.items()}
        parts["v"] = parts["k"]
        self.heads = replace(
            heads,
            scale=heads.scale if spec.attn_scale is None else spec.attn_scale,
            window=spec.window_of(layer),
            softcap=spec.attn_softcap,
        )
        self.qkv = Linear(spec.hidden_size, parts, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.out = Linear(
            self.passage.taken,
            {"out": self.passage.made},
            bias=spec.out_bias and self.passage.has_bias,
            dtype=dtype,
            device=device,
        )

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, spec.norm_eps, dtype, device, spec.norm_offset)

        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            widths = (parts["q"].total, parts["k"].total) if self.is_wide else (dim, dim)
            self.q_norm, self.k_norm = norm(widths[0]), norm(widths[1])
        self.sub_norm = norm(spec.num_heads * dim) if spec.sub_norms else None
        # [heads] as stored; the backend reads it in f32.
        self.sinks = torch.empty(own.q.size, device=device) if spec.sinks else None
        self.transform: HeadTransform | None = None
        self.ops: Ops | None = None

    def linears(self) -> dict[str, Linear]:
        return {"qkv": self.qkv, "out": self.out}

    def norms(self) -> dict[str, RMSNorm]:
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "attn_sub_norm": self.sub_norm}
        return {name: norm for name, norm in norms.items() if norm is not None}

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor to be filled besides those of linears and norms, by name."""
        if self.sinks is None:
            return {}
        kept = None if self.own.q.is_whole else Kept({WHOLE: self.own.q})
        return {"sinks": Parameter.of(self.sinks, kept)}

    def finish(self, ops: Ops, ropes: Ropes) -> None:
        self.ops = ops
        for linear in self.linears().values():
            linear.finish(ops)
        for norm in self.norms().values():
            norm.finish(ops)
        q_norm = k_norm = None  # of each head: the backend's work
        eps = 0.0
        if self.q_norm is not None and self.k_norm is not None and not self.is_wide:
            q_norm, k_norm, eps = self.q_norm.scale(), self.k_norm.scale(), self.q_norm.eps
        cos, sin = ropes.full if self.heads.window is None else ropes.local
        self.transform = HeadTransform(cos, sin, q_norm, k_norm, eps)

    def store(self, x: Tensor, at: LayerContext) -> Tensor:
        """Keys and values of [tokens, hidden] into the cache; returns queries [tokens, H, D]."""
        return self._store(self.qkv(x, at.adapted), at)

    def after(self, norm: RMSNorm | LayerNorm) -> NormedStore | None:
        """A norm, and `store` of what it makes, in fewer launches and without adapters. None: one
        after the other is as good."""
        return normed_store(norm.into(self.qkv.kernel), self._store)

    def _store(self, qkv: Tensor, at: LayerContext) -> Tensor:
        """`qkv` [tokens, (H + 2 Hkv) * D]"""
        assert self.transform is not None, "Attention used before finish()"
        if self.is_wide:
            qkv = self._norm_wide(qkv)
        return at.attention.prepare(qkv, self.transform, at.cache, at.plan, self.heads)

    def attend(self, q: Tensor, at: LayerContext) -> Tensor:
        """What the queries read from the cache -> [queries, hidden]."""
        y = at.attention.run(q, at.cache, at.plan, self.heads, self.sinks)  # [queries, H, D]
        y = self.passage.enter(y.reshape(y.shape[0], -1))
        if self.sub_norm is not None:
            y, _ = self.sub_norm(y, None)
        return self.passage.leave(self.out(y, at.adapted))

    def _norm_wide(self, qkv: Tensor) -> Tensor:
        """q and k normed over all their heads at once."""
        assert self.ops is not None and self.q_norm is not None and self.k_norm is not None
        weights = (self.q_norm.scale(), self.k_norm.scale())
        widths = list(self.qkv.parts.values())
        qkv = self.ops.norm_heads(qkv, widths, weights, self.q_norm.eps)
        if self.own.q.is_whole:
            return qkv
        dim, cuts = self.heads.head_dim, (self.own.q, self.own.kv, self.own.kv)
        pairs = zip(qkv.split(widths, 1), cuts, strict=True)
        return torch.cat([x[:, cut.begin * dim : cut.end * dim] for x, cut in pairs], 1)

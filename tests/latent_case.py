"""A random ragged batch of latents over shuffled pages, with the dense heads it stands for.

The oracle never sees a page, nor the absorbed form: `expected` makes keys and values of every head
in fp64 and attends to them densely, so it judges every backend, the reference included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.latent import LatentAttention, LatentPlan, Projected
from tests.paged_case import PagedCase, make_case


@dataclass(frozen=True, slots=True)
class Sizes:
    heads: int = 4
    rank: int = 32
    rope: int = 16
    nope: int = 16
    v: int = 24


@dataclass(frozen=True, slots=True)
class LatentCase:
    sizes: Sizes
    spec: AttnSpec
    paged: PagedCase  # page table, and batches over it
    tokens: list[Projected]  # per sequence
    kv_b: Tensor  # [heads, nope + v, rank]
    transform: HeadTransform

    def cache(self, backend: LatentAttention, fill: float = 0.0) -> LayerCache:
        shape = backend.cache_shape(self.paged.num_pages, self.spec)
        keys = torch.full(shape, fill, dtype=self.kv_b.dtype, device=self.kv_b.device)
        return LayerCache(keys, keys[:0])

    def feed(self, backend: LatentAttention, cache: LayerCache, lens: Sequence[int]) -> None:
        """Write the first lens[i] tokens of every sequence."""
        if sum(lens):
            plan = backend.plan(self.paged.batch(lens, lens, range(len(lens))), self.spec)
            self._prepare(backend, cache, plan, range(len(lens)), lens, lens)

    def step(
        self,
        backend: LatentAttention,
        cache: LayerCache,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        seqs: Sequence[int] | None = None,
        max_context: int | None = None,
    ) -> Tensor:
        """One layer's absorbed attention for a step, [tokens, heads, rank]."""
        seqs = range(len(query_lens)) if seqs is None else seqs
        batch = self.paged.batch(query_lens, context_lens, seqs)
        plan = backend.plan(batch, self.spec, max_context)
        q = self._prepare(backend, cache, plan, seqs, query_lens, context_lens)
        return backend.run(self.absorbed(q), cache, plan, self.spec)

    def step_in_forms(
        self,
        backend: LatentAttention,
        cache: LayerCache,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        prompt_lens: Sequence[int],
        seqs: Sequence[int] | None = None,
    ) -> Tensor:
        """Both forms, each token in its own: [tokens, heads, v]."""
        seqs = range(len(query_lens)) if seqs is None else seqs
        batch = self.paged.batch(query_lens, context_lens, seqs)
        batch = replace(batch, host_prompt_lens=np.asarray(prompt_lens, dtype=np.int32))
        plan = backend.plan(batch, self.spec)
        q = self._prepare(backend, cache, plan, seqs, query_lens, context_lens)
        out = q.new_full((len(q), self.sizes.heads, self.sizes.v), float("nan"))
        for part, form in ((plan.absorbed, self._absorbed), (plan.expanded, self._expanded)):
            if part is not None:
                tokens = slice(None) if part.tokens is None else part.tokens
                out[tokens] = form(part.take(q), backend, cache, plan)
        return out

    def _absorbed(
        self, q: Tensor, backend: LatentAttention, cache: LayerCache, plan: LatentPlan
    ) -> Tensor:
        latents = backend.run(self.absorbed(q), cache, plan, self.spec)
        weight = self.kv_b[:, self.sizes.nope :].double()
        return torch.einsum("thr,hvr->thv", latents.double(), weight).to(q.dtype)

    def _expanded(
        self, q: Tensor, backend: LatentAttention, cache: LayerCache, plan: LatentPlan
    ) -> Tensor:
        return backend.run_expanded(q, cache, plan, self.spec, self.expand)

    def absorbed(self, q: Tensor) -> Tensor:
        """[tokens, heads, nope + rope] -> [tokens, heads, rank + rope]; in fp64 and rounded, so
        that a row does not depend on the others."""
        plain, turned = q.split([self.sizes.nope, self.sizes.rope], -1)
        weight = self.kv_b[:, : self.sizes.nope].double()
        latent = torch.einsum("thn,hnr->thr", plain.double(), weight).to(q.dtype)
        return torch.cat((latent, turned), -1)

    def expand(self, latents: Tensor) -> Tensor:
        return torch.einsum("nr,hor->nho", latents.double(), self.kv_b.double()).to(latents.dtype)

    def _prepare(
        self,
        backend: LatentAttention,
        cache: LayerCache,
        plan: LatentPlan,
        seqs: Sequence[int],
        query_lens: Sequence[int],
        context_lens: Sequence[int],
    ) -> Tensor:
        spans = list(zip(seqs, query_lens, context_lens, strict=True))
        empty = [part[:0] for part in self.tokens[0]]
        parts = [
            torch.cat([*[self.tokens[s][i][n - q : n] for s, q, n in spans], empty[i]])
            for i in range(3)
        ]
        return backend.prepare(Projected(*parts), self.transform, cache, plan, self.spec)

    def expected(
        self, query_lens: Sequence[int], context_lens: Sequence[int], is_latent: bool = True
    ) -> Tensor:
        """fp64 results of tokens, as sums of latents or of values."""
        outs = []
        for (q, latent, key), q_len, n in zip(self.tokens, query_lens, context_lens, strict=True):
            q, latent, key = q[:n].double(), latent[:n].double(), key[:n, None].double()
            cos, sin = self.transform.cos, self.transform.sin
            assert cos is not None and sin is not None
            plain, turned = q.split([self.sizes.nope, self.sizes.rope], -1)
            expanded = torch.einsum("nr,hor->nho", latent, self.kv_b.double())
            k, v = expanded.split([self.sizes.nope, self.sizes.v], -1)
            logits = torch.einsum("qhd,khd->hqk", plain, k)
            turned, key = (_rotated(x, cos[:n], sin[:n]) for x in (turned, key))
            logits += torch.einsum("qhd,kd->hqk", turned, key[:, 0])
            logits = logits * self.spec.scale + torch.full_like(logits, float("-inf")).triu(1)
            weights = logits.softmax(-1)[:, n - q_len :]
            latents = torch.einsum("hqk,kr->qhr", weights, latent)
            outs.append(latents if is_latent else torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def make_latent_case(
    lens: Sequence[int],
    sizes: Sizes | None = None,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> LatentCase:
    sizes = sizes or Sizes()
    paged = make_case(lens, heads=(1, 1), head_dim=16, page_size=page_size, device=device)
    rng = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * scale).to(device, dtype)

    tokens = [
        Projected(
            draw(max(n, 1), sizes.heads, sizes.nope + sizes.rope),
            draw(max(n, 1), sizes.rank),
            draw(max(n, 1), sizes.rope),
        )
        for n in lens
    ]
    kv_b = draw(sizes.heads, sizes.nope + sizes.v, sizes.rank, scale=sizes.rank**-0.5)
    angles = torch.outer(
        torch.arange(float(max(lens))), 100.0 ** -torch.linspace(0, 1, sizes.rope // 2)
    )
    # Rounded as the model's dtype rounds them, so that half precision has nothing to excuse.
    cos, sin = (x.to(dtype).float().to(device) for x in (angles.cos(), angles.sin()))
    spec = AttnSpec(
        sizes.heads,
        1,
        sizes.rank + sizes.rope,
        (sizes.nope + sizes.rope) ** -0.5,
        page_size,
        value_dim=sizes.rank,
    )
    return LatentCase(sizes, spec, paged, tokens, kv_b, HeadTransform(cos, sin, None, None, 0.0))

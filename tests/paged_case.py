"""A random ragged batch over shuffled pages, with the dense keys and values it stands for.

The oracle never sees a page: `expected` computes attention in fp64 from the dense tensors, so it
judges every backend, the reference included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, HeadTransform, LayerCache
from quire.forward import Batch

PLAIN = HeadTransform(None, None, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class PagedCase:
    spec: AttnSpec
    page_table: Tensor  # [rows, pages]
    rows: Tensor  # [seqs] rows in use, out of order
    num_pages: int
    qkv: list[Tensor]  # per sequence [length, (heads + 2 * kv_heads) * dim]
    sinks: Tensor | None = None  # [heads]

    def batch(
        self, query_lens: Sequence[int], context_lens: Sequence[int], seqs: Sequence[int]
    ) -> Batch:
        """The last query_lens[i] of context_lens[i] tokens of sequence seqs[i]."""
        device, size = self.page_table.device, self.spec.page_size
        spans = [torch.arange(n - q, n) for q, n in zip(query_lens, context_lens, strict=True)]
        rows = self.rows[list(seqs)]
        pages = [
            self.page_table[row].cpu()[span // size] for row, span in zip(rows, spans, strict=True)
        ]
        empty = torch.zeros(0, dtype=torch.int64)
        positions = torch.cat([*spans, empty])
        slots = torch.cat([*pages, empty]).long() * size + positions % size
        lens = np.asarray(query_lens, dtype=np.int32)
        contexts = np.asarray(context_lens, dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        return Batch(
            input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
            positions=positions.to(device),
            slots=slots.to(device),
            query_starts=torch.from_numpy(starts).to(device),
            context_lens=torch.from_numpy(contexts).to(device),
            rows=rows.to(torch.int32).to(device),
            page_table=self._table(query_lens, context_lens, seqs),
            page_size=size,
            host_query_lens=lens,
            host_context_lens=contexts,
        )

    def _table(
        self, query_lens: Sequence[int], context_lens: Sequence[int], seqs: Sequence[int]
    ) -> Tensor:
        """Pages behind the window of every query of the step have become the page of NaNs."""
        if self.spec.window is None:
            return self.page_table
        needed: dict[int, int] = {}
        for s, q, n in zip(seqs, query_lens, context_lens, strict=True):
            oldest = max(0, n - q + 1 - self.spec.window)
            needed[s] = min(needed.get(s, n), oldest)
        table = self.page_table.clone()
        for s, oldest in needed.items():
            table[self.rows[s], : oldest // self.spec.page_size] = self.num_pages - 1
        return table

    def cache(self, backend: AttentionBackend, fill: float = 0.0) -> LayerCache:
        shape = backend.cache_shape(self.num_pages, self.spec)
        like = self.qkv[0]
        make = lambda: torch.full(shape, fill, dtype=like.dtype, device=like.device)  # noqa: E731
        cache = LayerCache(make(), make())
        if self.spec.window is not None:
            for part in cache[:2]:
                part[-1] = float("nan")
        return cache

    def step(
        self,
        backend: AttentionBackend,
        cache: LayerCache,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        seqs: Sequence[int] | None = None,
        transform: HeadTransform = PLAIN,
        max_context: int | None = None,
    ) -> Tensor:
        """One layer's attention for a step; earlier tokens must have been fed before."""
        seqs = range(len(query_lens)) if seqs is None else seqs
        batch = self.batch(query_lens, context_lens, seqs)
        parts = [
            self.qkv[s][n - q : n] for s, q, n in zip(seqs, query_lens, context_lens, strict=True)
        ]
        qkv = torch.cat([*parts, self.qkv[0][:0]])
        plan = backend.plan(batch, self.spec, max_context)
        q = backend.prepare(qkv, transform, cache, plan, self.spec)
        return backend.run(q, cache, plan, self.spec, self.sinks)

    def feed(
        self,
        backend: AttentionBackend,
        cache: LayerCache,
        lens: Sequence[int],
        transform: HeadTransform = PLAIN,
    ) -> None:
        """Write the first lens[i] tokens of every sequence."""
        if sum(lens):
            batch = self.batch(lens, lens, range(len(lens)))
            qkv = torch.cat([x[:n] for x, n in zip(self.qkv, lens, strict=True)])
            plan = backend.plan(batch, self.spec)
            backend.prepare(qkv, transform, cache, plan, self.spec)

    def expected(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        transform: HeadTransform = PLAIN,
    ) -> Tensor:
        outs = []
        for x, q_len, context in zip(self.qkv, query_lens, context_lens, strict=True):
            q, k, v = transformed(x[:context], transform, self.spec)
            group = self.spec.num_heads // self.spec.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            before = context - q_len
            logits = torch.einsum("qhd,khd->hqk", q[before:], k) * self.spec.scale
            if self.spec.softcap is not None:
                logits = (logits / self.spec.softcap).tanh() * self.spec.softcap
            logits += torch.full_like(logits, float("-inf")).triu(before + 1)
            if self.spec.window is not None:
                logits += torch.full_like(logits, float("-inf")).tril(before - self.spec.window)
            if self.sinks is not None:
                sinks = self.sinks.double().view(-1, 1, 1).expand(-1, q_len, 1)
                logits = torch.cat([logits, sinks], -1)
            weights = logits.softmax(-1)[..., :context]
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)


def transformed(x: Tensor, t: HeadTransform, spec: AttnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of tokens 0, 1, ... in fp64, after norm and rotation."""
    x = x.double().view(len(x), -1, spec.head_dim)
    q, k, v = x.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
    if t.q_norm is not None and t.k_norm is not None:
        q = q * (q.square().mean(-1, True) + t.eps).rsqrt() * t.q_norm.double()
        k = k * (k.square().mean(-1, True) + t.eps).rsqrt() * t.k_norm.double()
    if t.cos is not None and t.sin is not None:
        cos, sin = t.cos[: len(x)].double()[:, None], t.sin[: len(x)].double()[:, None]
        q, k = (_rotated(y, cos, sin) for y in (q, k))
    return q, k, v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def make_case(
    lens: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    has_sinks: bool = False,
) -> PagedCase:
    """Sequences of at most lens[i] tokens, on pages dealt at random; page 0 is left alone, and
    with a window the last one stands for all pages that were given back."""
    rng = torch.Generator().manual_seed(seed)
    scale = head_dim**-0.5
    spec = AttnSpec(heads[0], heads[1], head_dim, scale, page_size, window, softcap)
    pages_of = [-(-n // page_size) for n in lens]
    deal = 1 + torch.randperm(sum(pages_of) + 2, generator=rng).int()
    rows = torch.randperm(len(lens) + 2, generator=rng)[: len(lens)]
    table = torch.zeros(len(lens) + 2, max(pages_of, default=0) + 1, dtype=torch.int32)
    at = 0
    for row, count in zip(rows, pages_of, strict=True):
        table[row, :count] = deal[at : at + count]
        at += count
    width = (heads[0] + 2 * heads[1]) * head_dim
    qkv = [torch.randn(max(n, 1), width, generator=rng).to(device, dtype) for n in lens]
    sinks = torch.randn(heads[0], generator=rng).to(device) if has_sinks else None
    return PagedCase(spec, table.to(device), rows, len(deal) + 2, qkv, sinks)

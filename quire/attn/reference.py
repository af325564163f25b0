"""ReferenceAttention: the oracle. Plain torch, one sequence at a time, softmax in fp32.

Slow on purpose and free of cleverness, so that a disagreement is the other backend's bug. Pages
are gathered into a dense [context, heads, dim] before anything is computed. For speed see
`triton.py` and `cpu.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.cache_codes import RowCodes, store_rows
from quire.attn.heads import rotation_at, split_heads
from quire.attn.moves import move_by_head, move_rows
from quire.attn.tree import by_node, listed
from quire.forward import Batch


class ReferenceAttention:
    caps = AttnCaps(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        page_sizes=None,
        graphs=False,
        codes={"int8": 1, "fp8": 1, "int4": 2},
        trees=True,
    )

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = self.cache_dtype = dtype

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> Batch:
        return by_node(batch)

    def move(self, cache: LayerCache, sources: Tensor, targets: Tensor, spec: AttnSpec) -> None:
        for part in (cache.keys, cache.values):
            if cache.form.is_coded:
                move_rows(part, sources, targets, (spec.page_size, spec.num_kv_heads))
            else:
                move_by_head(part, sources, targets)

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        assert isinstance(plan, Batch)
        q, k, v = split_heads(qkv, heads, rotation_at(heads, plan.positions), spec)
        if (codes := RowCodes.of(cache, spec)) is not None:
            return store_rows(cache, codes, plan.slots, (q, k, v), heads)
        page, offset = plan.slots // plan.page_size, plan.slots % plan.page_size
        cache.keys[page, :, offset] = k
        cache.values[page, :, offset] = v
        return q

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, Batch)
        codes = RowCodes.of(cache, spec)
        if codes is not None:
            q = codes.turned_queries(q)
        outs = []
        begin = 0
        for i, length in enumerate(plan.host_query_lens.tolist()):
            context = int(plan.host_context_lens[i])
            moved = listed(plan, np.array([i]))
            num_pages = -(-max(context, moved.num_places if moved else 0) // plan.page_size)
            # Pages wholly behind the first query's window were given back: their ids are stale.
            oldest = 0 if spec.window is None else max(0, context - length + 1 - spec.window)
            column = oldest // plan.page_size
            pages = plan.page_table[plan.rows[i], column:num_pages].long()
            first = column * plan.page_size
            k = _dense(cache.keys, pages, codes)  # [keys, kv_heads, dim]
            v = _dense(cache.values, pages, codes)
            if moved is not None:
                at, places = (torch.from_numpy(x - first) for x in moved[1:])
                k[at], v[at] = k[places], v[places]
            k, v = k[: context - first], v[: context - first]
            outs.append(_causal(q[begin : begin + length].float(), k, v, spec, sinks))
            begin += length
        out = torch.cat(outs).to(q.dtype) if outs else torch.empty_like(q)
        return out if codes is None else codes.turned_back(out)


def _dense(cache: Tensor, pages: Tensor, codes: RowCodes | None) -> Tensor:
    """A copy."""
    if codes is not None:
        return codes.read(cache[pages]).flatten(0, 1)
    return cache[pages].transpose(1, 2).flatten(0, 1).float()


def _causal(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, sinks: Tensor | None) -> Tensor:
    """The queries are the last len(q) positions of the keys."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1)  # [keys, heads, dim]
    v = v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    positions = torch.arange(len(k), device=q.device)
    ages = positions[len(k) - len(q) :, None] - positions  # [queries, keys]
    hidden = ages < 0 if spec.window is None else (ages < 0) | (ages >= spec.window)
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        logits = torch.cat((logits, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    weights = logits.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)

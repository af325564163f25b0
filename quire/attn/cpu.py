"""CpuAttention: paged attention from torch's own flash kernel, batched without per-token Python.

Decodes are grouped by similar context length; each group's pages are gathered in one indexed
copy (12 KB rows, not tokens) and attended in one padded call. Prompt chunks go one by one. Heads
that share a kv head are folded into the query axis, so grouped queries need no repeated keys.

Bits do not depend on the company: masked keys contribute exact zeros, and the kernel's key
blocks start at the same place for any query count. A single query row would take another code
path in the library, so plain multi-head decodes are folded with a duplicate row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.heads import Rotation, rotation_at, split_heads
from quire.forward import Batch

MAX_PADDING = 1.25  # longest over shortest context allowed in one padded group


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many queries attended in one call."""

    tokens: Tensor | slice  # flat query tokens, sequence by sequence
    num_seqs: int
    num_queries: int  # per sequence
    pages: Tensor  # [seqs * pages_each]
    mask: Tensor | None  # [seqs, 1, queries * repeat, keys] additive; None: causal from zero
    num_keys: int  # keys per sequence handed to the kernel, padding included


@dataclass(slots=True)
class CpuPlan:
    batch: Batch
    groups: tuple[Group, ...]
    rotation: Rotation | None = None  # gathered by the first layer, the same for all


class CpuAttention:
    caps = AttnCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        page_sizes=None,
        graphs=False,
    )

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> CpuPlan:
        starts = batch.query_starts.numpy()
        groups = [
            _prompt_group(batch, spec, int(i), int(starts[i]), self.dtype)
            for i in np.flatnonzero(batch.host_query_lens > 1)
        ]
        singles = np.flatnonzero(batch.host_query_lens == 1)
        for seqs in _similar(singles, batch.host_context_lens):
            groups.append(_decode_group(batch, spec, seqs, starts[seqs], self.dtype))
        return CpuPlan(batch, tuple(groups))

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        assert isinstance(plan, CpuPlan)
        batch = plan.batch
        if plan.rotation is None:
            plan.rotation = rotation_at(heads, batch.positions)
        q, k, v = split_heads(qkv, heads, plan.rotation, spec)
        width = spec.num_kv_heads * spec.head_dim
        cache.keys.view(-1, width).index_copy_(0, batch.slots, k.reshape(-1, width))
        cache.values.view(-1, width).index_copy_(0, batch.slots, v.reshape(-1, width))
        return q

    def run(self, q: Tensor, cache: LayerCache, plan: object, spec: AttnSpec) -> Tensor:
        assert isinstance(plan, CpuPlan)
        if len(plan.groups) == 1 and plan.groups[0].num_seqs * plan.groups[0].num_queries == len(q):
            return _attend(q, cache, plan.groups[0], spec)  # keeps order: one group is all
        out = torch.empty_like(q)
        for group in plan.groups:
            out[group.tokens] = _attend(q[group.tokens], cache, group, spec)
        return out


def _similar(seqs: np.ndarray, context_lens: np.ndarray) -> list[np.ndarray]:
    """Split decodes into runs of similar context, so that padding stays small."""
    if len(seqs) < 2 or context_lens[seqs].max() <= MAX_PADDING * context_lens[seqs].min():
        return [seqs] if len(seqs) else []
    order = seqs[np.argsort(context_lens[seqs], kind="stable")]
    groups, begin = [], 0
    for i in range(1, len(order) + 1):
        if (
            i == len(order)
            or context_lens[order[i]] > MAX_PADDING * context_lens[order[begin]] + 32
        ):
            groups.append(np.sort(order[begin:i]))  # batch order inside a group
            begin = i
    return groups


def _repeat(spec: AttnSpec) -> int:
    """Query rows per token and kv head; never one (see the module docstring)."""
    return max(2, spec.num_heads // spec.num_kv_heads)


def _decode_group(
    batch: Batch, spec: AttnSpec, seqs: np.ndarray, tokens: np.ndarray, dtype: torch.dtype
) -> Group:
    lens = batch.host_context_lens[seqs]
    num_pages = -(-int(lens.max()) // spec.page_size)
    num_keys = num_pages * spec.page_size
    pages = batch.page_table[batch.rows[torch.from_numpy(seqs)], :num_pages].reshape(-1).long()
    mask = torch.zeros(len(seqs), 1, 1, num_keys, dtype=dtype)
    mask.masked_fill_(
        torch.arange(num_keys) >= torch.from_numpy(lens).view(-1, 1, 1, 1), float("-inf")
    )
    index = torch.from_numpy(tokens.astype(np.int64))
    return Group(index, len(seqs), 1, pages, mask, num_keys)


def _prompt_group(batch: Batch, spec: AttnSpec, seq: int, first: int, dtype: torch.dtype) -> Group:
    num_queries = int(batch.host_query_lens[seq])
    num_keys = int(batch.host_context_lens[seq])
    num_pages = -(-num_keys // spec.page_size)
    pages = batch.page_table[batch.rows[seq], :num_pages].long()
    mask = None
    if num_keys > num_queries:  # a chunk with a past: query j sees keys up to past + j
        past = num_keys - num_queries
        visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(past)
        mask = torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(~visible, float("-inf"))
        mask = mask.repeat_interleave(_repeat(spec), 0).view(1, 1, -1, num_keys)
    return Group(slice(first, first + num_queries), 1, num_queries, pages, mask, num_keys)


def _attend(q: Tensor, cache: LayerCache, group: Group, spec: AttnSpec) -> Tensor:
    seqs, queries, keys_each = group.num_seqs, group.num_queries, group.num_keys
    kv_heads, dim = spec.num_kv_heads, spec.head_dim
    k = cache.keys.index_select(0, group.pages).view(seqs, -1, kv_heads, dim)[:, :keys_each]
    v = cache.values.index_select(0, group.pages).view(seqs, -1, kv_heads, dim)[:, :keys_each]
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [seqs, kv_heads, keys, dim]
    ratio = spec.num_heads // kv_heads
    if group.mask is None:
        x = q.view(1, queries, spec.num_heads, dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            x, k, v, is_causal=True, scale=spec.scale, enable_gqa=ratio > 1
        )
        return out.transpose(1, 2).reshape(queries, spec.num_heads, dim)
    x = q.view(seqs, queries, kv_heads, ratio, dim)
    if ratio == 1:
        x = x.expand(-1, -1, -1, 2, -1)
    x = x.transpose(1, 2).reshape(seqs, kv_heads, -1, dim)  # [seqs, kv_heads, queries*repeat, dim]
    out = F.scaled_dot_product_attention(x, k, v, attn_mask=group.mask, scale=spec.scale)
    out = out.view(seqs, kv_heads, queries, -1, dim)[:, :, :, :ratio]
    return out.transpose(1, 2).reshape(seqs * queries, spec.num_heads, dim)

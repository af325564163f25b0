"""CpuAttention: paged attention from torch's own flash kernel, batched without per-token Python.

Decodes are grouped by similar context length; each group's pages are gathered in one indexed
copy (12 KB rows, not tokens) and attended in one padded call. Prompt chunks go one by one. Heads
that share a kv head are folded into the query axis, so grouped queries need no repeated keys. With
a window only its pages are gathered. Caps and sinks are beyond that kernel: see `cpu_softmax.py`.

Bits do not depend on the company: masked keys contribute exact zeros, and the kernel's key
blocks start at the same place for any query count. Three things must be kept from the library: key
counts whose tail is summed in another order (`_key_room` pads them), blocks of a few query rows,
which take another matrix multiplication (rows are padded to a multiple of 8, of 16 for wide heads),
and keys that do not start on a block's border (a window's are gathered from one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn import cpu_softmax
from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.cache_codes import RowCodes, store_rows
from quire.attn.heads import Rotation, rotation_at, split_heads
from quire.attn.moves import move_rows, move_tokens
from quire.attn.tree import Listed, by_node, listed
from quire.forward import Batch
from quire.kv.allocator import SCRATCH_PAGE

MAX_PADDING = 1.25  # longest over shortest context allowed in one padded group
KEY_BLOCK = 512  # keys the library's kernel folds at a time
KEY_ALIGN = 16
MAX_KEY_TAIL = 128  # keys of a last block that every CPU's library sums in one piece
MAX_MASK_ROWS = 512  # queries of one masked call: bounds the mask, which is queries x keys


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many queries attended in one call."""

    tokens: Tensor | slice  # flat query tokens, sequence by sequence
    num_seqs: int
    num_queries: int  # per sequence
    pages: Tensor  # [seqs * pages_each]
    mask: Tensor | None  # [seqs, 1, rows or 1, keys] additive; None: causal from zero
    num_keys: int  # keys per sequence handed to the kernel, padding included
    moved: Listed | None = None  # keys that lie elsewhere; counted from the first page gathered


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
        codes={"int8": 1, "fp8": 1, "int4": 2},
        trees=True,
    )

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = self.cache_dtype = dtype

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> CpuPlan:
        batch = by_node(batch)
        starts = batch.query_starts.numpy()
        groups: list[Group] = []
        for i in np.flatnonzero(batch.host_query_lens > 1):
            groups += _prompt_groups(batch, spec, int(i), int(starts[i]), self.dtype)
        singles = np.flatnonzero(batch.host_query_lens == 1)
        lens = batch.host_context_lens
        for seqs in _similar(singles, lens - _first_keys(lens - 1, spec)):
            groups.append(_decode_group(batch, spec, seqs, starts[seqs], self.dtype))
        return CpuPlan(batch, tuple(groups))

    def move(self, cache: LayerCache, sources: Tensor, targets: Tensor, spec: AttnSpec) -> None:
        for part in (cache.keys, cache.values):
            if cache.form.is_coded:
                move_rows(part, sources, targets, (spec.page_size, spec.num_kv_heads))
            else:
                move_tokens(part, sources, targets)

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        assert isinstance(plan, CpuPlan)
        batch = plan.batch
        if plan.rotation is None:
            plan.rotation = rotation_at(heads, batch.positions)
        q, k, v = split_heads(qkv, heads, plan.rotation, spec)
        if (codes := RowCodes.of(cache, spec)) is not None:
            return store_rows(cache, codes, batch.slots, (q, k, v), heads)
        width = spec.num_kv_heads * spec.head_dim
        cache.keys.view(-1, width).index_copy_(0, batch.slots, k.reshape(-1, width))
        cache.values.view(-1, width).index_copy_(0, batch.slots, v.reshape(-1, width))
        return q

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, CpuPlan)
        codes = RowCodes.of(cache, spec)
        if codes is not None and codes.block > 1:
            own = cache._replace(form=replace(cache.form, rotates=False))
            return codes.turned_back(self.run(codes.turned_queries(q), own, plan, spec, sinks))
        if len(plan.groups) == 1 and plan.groups[0].num_seqs * plan.groups[0].num_queries == len(q):
            return _attend(q, cache, plan.groups[0], spec, sinks)  # keeps order: one group is all
        out = torch.empty_like(q)
        for group in plan.groups:
            out[group.tokens] = _attend(q[group.tokens], cache, group, spec, sinks)
        return out


def _similar(seqs: np.ndarray, key_counts: np.ndarray) -> list[np.ndarray]:
    """Split decodes into runs of similar context, so that padding stays small."""
    if len(seqs) < 2 or key_counts[seqs].max() <= MAX_PADDING * key_counts[seqs].min():
        return [seqs] if len(seqs) else []
    order = seqs[np.argsort(key_counts[seqs], kind="stable")]
    groups, begin = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or key_counts[order[i]] > MAX_PADDING * key_counts[order[begin]] + 32:
            groups.append(np.sort(order[begin:i]))  # batch order inside a group
            begin = i
    return groups


def _aligned(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def _key_room(num: int) -> int:
    """Keys to hand over when `num` are wanted.

    The library walks keys in blocks of KEY_BLOCK. It sums a longer last block in two pieces whose
    border follows its length (from 193 keys on with some CPUs, from 257 with others), so a longer
    one is filled up."""
    tail = num % KEY_BLOCK
    return num - tail + KEY_BLOCK if tail > MAX_KEY_TAIL else _aligned(num, KEY_ALIGN)


def _row_align(spec: AttnSpec) -> int:
    return 8 if spec.head_dim <= 128 else 16


def _first_keys(positions: np.ndarray, spec: AttnSpec) -> np.ndarray:
    """Where to gather keys from for queries at these positions and later: on a border of both
    pages and blocks, at or before the first key that their windows hold."""
    if spec.window is None:
        return np.zeros_like(positions)
    unit = math.lcm(KEY_BLOCK, spec.page_size)
    first: np.ndarray = np.maximum(positions + 1 - spec.window, 0) // unit * unit
    return first


def _pages(batch: Batch, rows: Tensor, num_keys: int) -> Tensor:
    """[rows, pages] that hold at least num_keys; past a row's own pages any id will do."""
    num_pages = -(-num_keys // batch.page_size)
    found = batch.page_table[rows, :num_pages].long()
    return F.pad(found, (0, num_pages - found.shape[1]), value=SCRATCH_PAGE)


def _window_pages(
    batch: Batch, rows: Tensor, positions: np.ndarray, num_keys: int, spec: AttnSpec
) -> Tensor:
    """The same from `_first_keys` on, leaving out what lies behind the windows: stale ids."""
    if spec.window is None:
        return _pages(batch, rows, num_keys)
    size, table = batch.page_size, batch.page_table
    first = torch.from_numpy(_first_keys(positions, spec) // size).view(-1, 1)
    oldest = torch.from_numpy(np.maximum(positions + 1 - spec.window, 0) // size).view(-1, 1)
    columns = first + torch.arange(-(-num_keys // size))
    found = table[rows.long().view(-1, 1), columns.clamp(max=table.shape[1] - 1)].long()
    return found.masked_fill_((columns < oldest) | (columns >= table.shape[1]), SCRATCH_PAGE)


def _decode_group(
    batch: Batch, spec: AttnSpec, seqs: np.ndarray, tokens: np.ndarray, dtype: torch.dtype
) -> Group:
    lens = batch.host_context_lens[seqs]
    first = _first_keys(lens - 1, spec)
    num_keys = _key_room(int((lens - first).max()))
    rows = batch.rows[torch.from_numpy(seqs)]
    num_places = num_keys
    if (moved := listed(batch, seqs)) is not None:
        behind = first[moved.seqs]
        moved = Listed(moved.seqs, moved.positions - behind, moved.places - behind)
        num_places = max(num_keys, moved.num_places)
    pages = _window_pages(batch, rows, lens - 1, num_places, spec).reshape(-1)
    mask = torch.zeros(len(seqs), 1, 1, num_keys, dtype=dtype)
    ages = torch.from_numpy(lens - 1 - first).view(-1, 1, 1, 1) - torch.arange(num_keys)
    mask.masked_fill_(_hidden(ages, spec), float("-inf"))
    index = torch.from_numpy(tokens.astype(np.int64))
    return Group(index, len(seqs), 1, pages, mask, num_keys, moved)


def _hidden(ages: Tensor, spec: AttnSpec) -> Tensor:
    """True where a key is masked: it lies after the query, or `window` or more before it."""
    return ages < 0 if spec.window is None else (ages < 0) | (ages >= spec.window)


def _prompt_groups(
    batch: Batch, spec: AttnSpec, seq: int, first: int, dtype: torch.dtype
) -> list[Group]:
    """A prompt chunk: in one piece from position zero, else in pieces with a mask each."""
    num_queries, end = int(batch.host_query_lens[seq]), int(batch.host_context_lens[seq])
    row = batch.rows[seq : seq + 1]
    past = end - num_queries
    sees_all = spec.window is None or end <= spec.window
    if past == 0 and sees_all and spec.softcap is None:  # padding lies in everybody's future
        tokens = slice(first, first + num_queries)
        pages = _pages(batch, row, _key_room(end))[0]
        return [Group(tokens, 1, num_queries, pages, None, _key_room(end))]
    groups = []
    for start in range(0, num_queries, MAX_MASK_ROWS):
        count = min(MAX_MASK_ROWS, num_queries - start)
        position = np.array([past + start])
        behind = int(_first_keys(position, spec)[0])
        num_keys = _key_room(past + start + count - behind)
        pages = _window_pages(batch, row, position, num_keys, spec)[0]
        mask = _piece_mask(past + start - behind, count, num_keys, spec).to(dtype)
        tokens = slice(first + start, first + start + count)
        groups.append(Group(tokens, 1, count, pages, mask, num_keys))
    return groups


def _piece_mask(first: int, count: int, num_keys: int, spec: AttnSpec) -> Tensor:
    """[1, 1, rows, keys] of queries at the keys first, first + 1, ..."""
    ages = torch.arange(first, first + count)[:, None] - torch.arange(num_keys)
    mask = torch.zeros(count, num_keys).masked_fill_(_hidden(ages, spec), float("-inf"))
    mask = mask.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0)
    return F.pad(mask, (0, 0, 0, -len(mask) % _row_align(spec)))[None, None]


def _attend(
    q: Tensor, cache: LayerCache, group: Group, spec: AttnSpec, sinks: Tensor | None
) -> Tensor:
    seqs, queries, keys_each = group.num_seqs, group.num_queries, group.num_keys
    kv_heads, dim = spec.num_kv_heads, spec.head_dim
    codes = RowCodes.of(cache, spec)

    def gathered(part: Tensor) -> Tensor:
        pages = part.index_select(0, group.pages)
        rows = pages if codes is None else codes.read(pages).to(q.dtype)
        rows = rows.view(seqs, -1, kv_heads, dim)
        if group.moved is not None:
            at, positions, places = map(torch.from_numpy, group.moved)
            rows[at, positions] = rows[at, places]
        found = rows[:, :keys_each].transpose(1, 2)
        return _cleared(found, group, queries * (spec.num_heads // kv_heads))

    k, v = gathered(cache.keys), gathered(cache.values)  # [seqs, kv_heads, keys, dim]
    ratio = spec.num_heads // kv_heads
    is_plain = spec.softcap is None and sinks is None
    if group.mask is None and is_plain:
        # As many queries as keys: the kernel reads keys up to the end of each block of queries.
        x = F.pad(q, (0, 0, 0, 0, 0, keys_each - queries)).transpose(0, 1).unsqueeze(0)
        out = F.scaled_dot_product_attention(
            x, k, v, is_causal=True, scale=spec.scale, enable_gqa=ratio > 1
        )
        return out[0].transpose(0, 1)[:queries].reshape(queries, spec.num_heads, dim)
    rows = queries * ratio
    x = q.view(seqs, queries, kv_heads, ratio, dim).transpose(1, 2)
    x = x.reshape(seqs, kv_heads, rows, dim)
    if is_plain:
        x = F.pad(x, (0, 0, 0, -rows % _row_align(spec)))
        out = F.scaled_dot_product_attention(x, k, v, attn_mask=group.mask, scale=spec.scale)
    elif group.mask is not None:
        out = cpu_softmax.attend(x, k, v, group.mask, spec, sinks)
    else:
        out = _attend_from_zero(x, k, v, spec, sinks)
    out = out[:, :, :rows].reshape(seqs, kv_heads, queries, ratio, dim)
    return out.transpose(1, 2).reshape(seqs * queries, spec.num_heads, dim)


def _cleared(x: Tensor, group: Group, num_rows: int) -> Tensor:
    """Zeros in place of keys that no query sees: a page may hold what another form left there,
    which read as floats may be NaN, and a weight of 0 times NaN is NaN. `x` is a copy."""
    if group.mask is None:
        x[:, :, group.num_queries :] = 0
        return x
    unseen = (group.mask[:, :, :num_rows] == float("-inf")).all(dim=2)  # [seqs or 1, 1, keys]
    return x.masked_fill_(unseen[..., None], 0)


def _attend_from_zero(
    x: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, sinks: Tensor | None
) -> Tensor:
    """A prompt from its start, in pieces: caps and sinks know no causal mode, and a mask of all
    queries by all keys would outgrow the keys."""
    ratio = spec.num_heads // spec.num_kv_heads
    pieces: list[Tensor] = []
    for rows in x.split(MAX_MASK_ROWS * ratio, dim=2):
        start = len(pieces) * MAX_MASK_ROWS
        end = start + rows.shape[2] // ratio
        mask = _piece_mask(start, end - start, end, spec)
        seen = k[:, :, :end], v[:, :, :end]
        pieces.append(cpu_softmax.attend(rows, *seen, mask, spec, sinks))
    return torch.cat(pieces, dim=2)

"""Attention with the softmax in the open, for what the library's kernel cannot do: caps and sinks.

Plain matrix products around torch's softmax, in fp32. A row's bits do not depend on the company:
products keep one shape per row (rows padded to a multiple of 16, keys to whole blocks, values
multiplied block by block in the order of the keys), tanh is the same anywhere in a tensor, and the
softmax works row by row, to which masked keys add exact zeros. `cpu.py` gathers and masks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnSpec

KEY_BLOCK = 256  # keys of one product with values: the library sums longer ones by their length
ROW_ALIGN = 16
SINK_PAD = 16  # columns that hold a sink, so that keys keep their place in vectors
MAX_LOGITS = 1 << 22  # of one call: bounds what is held between products


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttnSpec, sinks: Tensor | None
) -> Tensor:
    """Queries [seqs, kv_heads, rows, dim] over keys and values [seqs, kv_heads, keys, dim].

    Row r is query r // ratio, head r % ratio of the kv head's; `mask` is additive, [seqs or 1, 1,
    rows or 1, keys]; `sinks` are [heads]."""
    seqs, kv_heads, rows, _ = q.shape
    k, v = _whole_blocks(k), _whole_blocks(v)
    num_keys = k.shape[2]
    mask = F.pad(mask, (0, num_keys - mask.shape[-1]), value=float("-inf"))
    mask = mask.expand(seqs, -1, -1, -1)
    if mask.shape[2] == 1:
        mask = mask.expand(-1, -1, rows, -1)
    lead = None if sinks is None else _sink_columns(sinks, kv_heads, rows)
    out = torch.empty_like(q)
    for s, r in _pieces(seqs, rows, kv_heads * num_keys):
        own = None if lead is None else lead[:, r]
        weights = _weights(q[s, :, r].float(), k[s], mask[s, :, r], spec, own)
        out[s, :, r] = _weighted(weights, v[s])[:, :, : r.stop - r.start]
    return out


def _whole_blocks(x: Tensor) -> Tensor:
    """Contiguous fp32, padded with zeros to whole blocks of keys."""
    seqs, heads, keys, dim = x.shape
    whole = torch.zeros(seqs, heads, keys + -keys % KEY_BLOCK, dim, dtype=torch.float32)
    whole[:, :, :keys] = x
    return whole


def _sink_columns(sinks: Tensor, kv_heads: int, rows: int) -> Tensor:
    """[kv_heads, rows, SINK_PAD] logits to stand before those of the keys."""
    columns = torch.full((kv_heads, rows, SINK_PAD), float("-inf"), dtype=torch.float32)
    by_kv_head = sinks.float().view(kv_heads, -1)  # the heads of a kv head take turns in its rows
    columns[..., 0] = by_kv_head.repeat(1, rows // by_kv_head.shape[1])
    return columns


def _pieces(seqs: int, rows: int, logits_per_row: int) -> Iterator[tuple[slice, slice]]:
    """Sequences and rows to attend in one call each."""
    rows_each = max(ROW_ALIGN, MAX_LOGITS // logits_per_row // ROW_ALIGN * ROW_ALIGN)
    rows_held = max(ROW_ALIGN, min(rows, rows_each))
    seqs_each = max(1, MAX_LOGITS // (logits_per_row * rows_held))
    for s in range(0, seqs, seqs_each):
        for r in range(0, rows, rows_each):
            yield slice(s, min(s + seqs_each, seqs)), slice(r, min(r + rows_each, rows))


def _weights(q: Tensor, k: Tensor, mask: Tensor, spec: AttnSpec, lead: Tensor | None) -> Tensor:
    """Softmax of the logits, [seqs, kv_heads, padded rows, keys]; what sinks take is left out."""
    missing = -q.shape[2] % ROW_ALIGN
    logits = torch.matmul(F.pad(q, (0, 0, 0, missing)), k.transpose(2, 3))
    if spec.softcap is None:
        logits.mul_(spec.scale)
    else:
        logits.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    logits.add_(F.pad(mask, (0, 0, 0, missing)))
    if lead is None:
        return logits.softmax(-1)
    lead = F.pad(lead, (0, 0, 0, missing)).expand(len(q), -1, -1, -1)
    return torch.cat((lead, logits), -1).softmax(-1)[..., SINK_PAD:]


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Values summed by their weights, block after block."""
    out = torch.zeros(*weights.shape[:3], v.shape[3], dtype=torch.float32)
    for start in range(0, v.shape[2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        out += torch.matmul(weights[..., block], v[:, :, block])
    return out

"""LatentReference: the oracle of latent attention. Plain torch, one sequence at a time, in fp32.

Both forms as they are defined, from pages gathered into a dense [context, dim]. Slow on purpose;
see `latent_cpu.py` and `latent_triton.py` for speed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.cache_codes import RowCodes
from quire.attn.heads import Rotation, rotate, rotation_at
from quire.attn.latent import Expand, LatentAttention, LatentPlan, Projected
from quire.attn.latent_forms import split_forms
from quire.attn.tree import by_node, listed
from quire.forward import Batch


class LatentReference(LatentAttention):
    caps = AttnCaps(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        head_dims=None,
        page_sizes=None,
        graphs=False,
        codes={"int8": 1, "fp8": 1},
        trees=True,
    )

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> LatentPlan:
        batch = by_node(batch)
        return LatentPlan(batch, *split_forms(batch))

    def prepare(
        self,
        tokens: Projected,
        heads: HeadTransform,
        cache: LayerCache,
        plan: LatentPlan,
        spec: AttnSpec,
    ) -> Tensor:
        rotation = rotation_at(heads, plan.batch.positions)
        return store(tokens, rotation, cache, plan.batch.slots, spec)

    def run(self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec) -> Tensor:
        assert plan.absorbed is not None and spec.value_dim is not None
        batch, outs = plan.absorbed.batch, []
        for i, piece in enumerate(q.float().split(batch.host_query_lens.tolist())):
            keys = _context(cache, batch, i, spec)[:, None]  # [context, 1, head_dim]
            outs.append(_causal(piece, keys, keys[..., : spec.value_dim], spec.scale))
        return torch.cat(outs).to(q.dtype) if outs else q[..., : spec.value_dim]

    def run_expanded(
        self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec, expand: Expand
    ) -> Tensor:
        assert plan.expanded is not None and spec.value_dim is not None
        batch, outs = plan.expanded.batch, []
        nope_dim = q.shape[-1] - (spec.head_dim - spec.value_dim)
        for i, piece in enumerate(q.float().split(batch.host_query_lens.tolist())):
            rows = _context(cache, batch, i, spec)
            latent, rotated = rows.split([spec.value_dim, spec.head_dim - spec.value_dim], -1)
            expanded = expand(latent.to(q.dtype)).float()  # [context, heads, nope + v_dim]
            shared = rotated[:, None].expand(-1, q.shape[1], -1)
            keys = torch.cat((expanded[..., :nope_dim], shared), -1)
            outs.append(_causal(piece, keys, expanded[..., nope_dim:], spec.scale))
        return torch.cat(outs).to(q.dtype)


def store(
    tokens: Projected, rotation: Rotation, cache: LayerCache, slots: Tensor, spec: AttnSpec
) -> Tensor:
    """Write a step's latents and rotated keys, and return its rotated queries."""
    rope_dim = tokens.key.shape[-1]
    key = rotate(tokens.key[:, None], rotation)[:, 0]
    rows = torch.cat((tokens.latent, key), -1)
    if (codes := RowCodes.of(cache, spec)) is not None:
        codes.write(cache.keys, slots, rows[:, None], None)
    else:
        cache.keys.view(-1, rows.shape[-1]).index_copy_(0, slots, rows)
    plain, turned = tokens.q.split([tokens.q.shape[-1] - rope_dim, rope_dim], -1)
    return torch.cat((plain, rotate(turned, rotation)), -1)


def _context(cache: LayerCache, batch: Batch, seq: int, spec: AttnSpec) -> Tensor:
    """[context, head_dim] of a sequence, in fp32."""
    context, moved = int(batch.host_context_lens[seq]), listed(batch, np.array([seq]))
    num_places = context if moved is None else max(context, moved.num_places)
    pages = batch.page_table[batch.rows[seq], : -(-num_places // batch.page_size)].long()
    if (codes := RowCodes.of(cache, spec)) is not None:
        found = codes.read(cache.keys[pages]).flatten(0, 2)
    else:
        found = cache.keys[pages].flatten(0, 2).float()
    if moved is not None:
        at, places = map(torch.from_numpy, moved[1:])
        found[at] = found[places]
    return found[:context]


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The queries are the last len(q) positions of the context; all heads share one kv head."""
    k, v = (x.expand(-1, q.shape[1], -1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    future = future.triu(diagonal=len(k) - len(q) + 1)
    weights = logits.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)

"""GraphAttention: a backend whose keys and values stay in autograd's graph instead of in pages.

So the engine's own decoder, in every family, is what is trained: no second wiring of a model. A
step is whole sequences of one length from position 0, padded behind. Keys of a layer are in the
plan between its `prepare` and its `run`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.heads import Rotation, rotation_at, split_heads
from quire.forward import Batch

NO_CACHE = LayerCache(torch.empty(0), torch.empty(0))


@dataclass(slots=True)
class GraphPlan:
    num_seqs: int
    length: int
    positions: Tensor  # [seqs * length]
    keys: Tensor | None = None  # [tokens, kv heads, dim] of the layer that was prepared last
    values: Tensor | None = None
    _rotations: dict[int, Rotation] = field(default_factory=dict)  # by table: most layers share one

    @staticmethod
    def of(ids: Tensor) -> GraphPlan:
        """`ids` is [seqs, length]."""
        num_seqs, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(num_seqs)
        return GraphPlan(num_seqs, length, positions)

    def rotation(self, heads: HeadTransform) -> Rotation:
        if (table := id(heads.cos)) not in self._rotations:  # which outlives the plan
            self._rotations[table] = rotation_at(heads, self.positions)
        return self._rotations[table]

    def by_head(self, x: Tensor) -> Tensor:
        """[tokens, heads, dim] -> [seqs, heads, length, dim]"""
        made: Tensor = x.unflatten(0, (self.num_seqs, self.length)).transpose(1, 2)
        return made


class GraphAttention:
    caps = AttnCaps(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        head_dims=None,
        page_sizes=None,
        graphs=False,
    )
    cache_dtype = torch.float32

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (0,)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> object:
        raise AssertionError("a plan is made of token ids: GraphPlan.of")

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        assert isinstance(plan, GraphPlan)
        q, plan.keys, plan.values = split_heads(qkv, heads, plan.rotation(heads), spec)
        return q

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, GraphPlan) and plan.keys is not None and plan.values is not None
        q, k, v = (plan.by_head(x) for x in (q, plan.keys, plan.values))
        plan.keys = plan.values = None
        if spec.window is None and spec.softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=spec.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            out = _attend(q, k, v, spec, sinks)
        joined: Tensor = out.transpose(1, 2).flatten(0, 1)
        return joined


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, sinks: Tensor | None) -> Tensor:
    """With what the library's function has no argument for."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) * spec.scale  # [seqs, heads, queries, keys]
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    positions = torch.arange(q.shape[2], device=q.device)
    ages = positions[:, None] - positions
    hidden = ages < 0 if spec.window is None else (ages < 0) | (ages >= spec.window)
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
        logits = torch.cat((logits, column.to(logits)), -1)
    return logits.softmax(-1)[..., : k.shape[2]] @ v

"""RolledAttention: a head's keys when it goes on from its own guesses, all positions at once.

Roll 0 reads the target's states everywhere, with ordinary causal attention. In roll j every
position stands for a chain of its own: it sees roll 0 up to its position, and of rolls 1 to j its
own place alone, which are the guesses it goes on from. So a head is trained on what it will meet
when it drafts, and the target's states are read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.heads import Rotation, rotation_at
from quire.distill.attention import GraphAttention, GraphPlan


@dataclass(slots=True)
class RolledPlan(GraphPlan):
    rolls: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and values of each

    @staticmethod
    def of(ids: Tensor) -> RolledPlan:
        plain = GraphPlan.of(ids)
        return RolledPlan(plain.num_seqs, plain.length, plain.positions)

    def rotation(self, heads: HeadTransform) -> Rotation:
        """Every roll is a position ahead of the one before: none is kept."""
        return rotation_at(heads, self.positions)


class RolledAttention(GraphAttention):
    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        assert isinstance(plan, RolledPlan)
        q = super().prepare(qkv, heads, cache, plan, spec)
        assert plan.keys is not None and plan.values is not None
        group = spec.num_heads // spec.num_kv_heads
        k, v = (plan.by_head(x.repeat_interleave(group, 1)) for x in (plan.keys, plan.values))
        plan.rolls.append((k, v))
        plan.keys = plan.values = None
        return q

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(plan, RolledPlan) and sinks is None
        q = plan.by_head(q)
        (k, v), *later = plan.rolls
        if not later:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        else:
            places = torch.arange(plan.length, device=q.device)
            seen = q @ k.transpose(-1, -2)  # [seqs, heads, queries, keys]
            seen = seen.masked_fill(places[:, None] < places, float("-inf"))
            own = torch.stack([(q * key).sum(-1) for key, _ in later], -1)
            weights = (torch.cat((seen, own), -1) * spec.scale).softmax(-1)
            out = weights[..., : plan.length] @ v
            for i, (_, value) in enumerate(later):
                out = out + weights[..., plan.length + i, None] * value
        joined: Tensor = out.transpose(1, 2).flatten(0, 1)
        return joined

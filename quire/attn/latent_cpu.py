"""LatentCpu: latent attention from `CpuAttention` with one kv head, whose keys are its values too.

Every token takes the absorbed form. Until contexts are long, the products around attention cost a
CPU far more than attention itself, and with one form bits cannot depend on the schedule. The last
numbers of a result are weighted sums of rotated keys. They mean nothing and are cut off, which is
cheaper than copying the latents out of the slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.cpu import CpuAttention
from quire.attn.heads import rotation_at
from quire.attn.latent import Expand, LatentAttention, LatentPlan, Projected
from quire.attn.latent_forms import Part
from quire.attn.latent_reference import store
from quire.forward import Batch


class LatentCpu(LatentAttention):
    caps = replace(CpuAttention.caps, codes={"int8": 1, "fp8": 1})

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._shared = CpuAttention(dtype)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> LatentPlan:
        whole = self._shared.plan(batch, replace(spec, value_dim=None), max_context)
        return LatentPlan(batch, Part(None, batch), None, absorbed_plan=whole)

    def prepare(
        self,
        tokens: Projected,
        heads: HeadTransform,
        cache: LayerCache,
        plan: LatentPlan,
        spec: AttnSpec,
    ) -> Tensor:
        if plan.rotation is None:
            plan.rotation = rotation_at(heads, plan.batch.positions)
        return store(tokens, plan.rotation, cache, plan.batch.slots, spec)

    def run(self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec) -> Tensor:
        twice = cache._replace(values=cache.keys)
        out = self._shared.run(q, twice, plan.absorbed_plan, spec)
        return out[..., : spec.value_dim]

    def run_expanded(
        self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec, expand: Expand
    ) -> Tensor:
        raise AssertionError("no token is expanded on a CPU")

"""LatentTriton: latent attention on CUDA whose bits do not depend on the batch.

`TritonAttention` lays out tiles, splits and scratch of the absorbed form. It is told that every
part of the query heads has a kv head of its own; only the kernels know that all parts read the same
pages. Prompts in expanded form go through `kernels/latent_expanded.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.latent import Expand, LatentAttention, LatentPlan, Projected
from quire.attn.latent_forms import Forms, Part, split_forms
from quire.attn.latent_rounds import BLOCK_KEYS, ExpandedPlan, plan_rounds
from quire.attn.triton import TritonAttention, TritonPlan
from quire.forward import Batch
from quire.kernels.latent_expanded import (
    ExpandedKeys,
    empty_states,
    expanded_attention,
    expanded_launch,
)
from quire.kernels.latent_prefill import latent_prefill_attention
from quire.kernels.latent_split import latent_split_attention
from quire.kernels.latent_tile import head_blocks, latent_config
from quire.kernels.latent_write import latent_write
from quire.kernels.merge_splits import merge_splits
from quire.kernels.paged_inputs import PagedInputs
from quire.kernels.paged_tile import PagedConfig
from quire.kernels.rope_kv_write import Rope


class LatentTriton(LatentAttention):
    caps = AttnCaps(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        head_dims=None,
        page_sizes=frozenset({16, 32, 64, 128, 256}),
        graphs=True,
        trees=True,
        by_node=True,
    )

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        config: PagedConfig | None = None,
        block_keys: int = BLOCK_KEYS,
    ) -> None:
        super().__init__(dtype)
        assert config is None or config.octave == 0, "latents are cut evenly"
        self._config, self._block_keys = config, block_keys
        self._layouts: dict[int, TritonAttention] = {}  # by number of heads: owners of scratch

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> LatentPlan:
        forms = split_forms(batch)
        if max_context is not None:
            forms = Forms(Part(None, batch), None)
        absorbed = expanded = None
        if forms.expanded is not None:
            tile_tokens = expanded_launch(self.dtype)[0].block_m
            expanded = plan_rounds(forms.expanded.batch, tile_tokens, self._block_keys)
        if forms.absorbed is not None:
            layout, parts = self._layout(spec)
            assert spec.value_dim is not None
            heads = replace(
                spec, num_kv_heads=parts, head_dim=spec.value_dim, value_dim=None, window=None
            )
            # There is no kernel that reads shared latents once for several sequences.
            absorbed_batch = replace(forms.absorbed.batch, shares_prefix=False)
            absorbed = layout.plan(absorbed_batch, heads, max_context)
        return LatentPlan(batch, *forms, absorbed_plan=absorbed, expanded_plan=expanded)

    def _layout(self, spec: AttnSpec) -> tuple[TritonAttention, int]:
        config = self._config or latent_config(spec.num_heads, self.dtype)
        config = replace(config, folds=False)  # the kernel leaves every split's state
        if spec.num_heads not in self._layouts:
            self._layouts[spec.num_heads] = TritonAttention(self.dtype, config)
        return self._layouts[spec.num_heads], head_blocks(spec.num_heads, config)

    def prepare(
        self,
        tokens: Projected,
        heads: HeadTransform,
        cache: LayerCache,
        plan: LatentPlan,
        spec: AttnSpec,
    ) -> Tensor:
        assert heads.cos is not None and heads.sin is not None
        batch, rope = plan.batch, Rope(heads.cos, heads.sin)
        latent_write(*tokens, cache.keys, batch.positions, batch.slots, rope)
        return tokens.q

    def run(self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec) -> Tensor:
        layout = plan.absorbed_plan
        assert isinstance(layout, TritonPlan) and spec.value_dim is not None
        assert q.dtype == self.dtype, f"{q.dtype=} {self.dtype=}"
        batch, config = layout.batch, layout.config
        parts = head_blocks(spec.num_heads, config)
        inputs = PagedInputs(
            cache.keys,
            cache.keys,
            batch.page_table,
            batch.rows,
            batch.query_starts,
            batch.context_lens,
            spec.scale,
            paths=batch.paths,
        )
        out = q.new_empty(*q.shape[:2], spec.value_dim)
        if layout.prefill_tiles is not None:
            latent_prefill_attention(q, inputs, layout.prefill_tiles, config, parts, out)
        if layout.split is not None:
            latent_split_attention(q, inputs, layout.split, config, parts, out)
            merge_splits(inputs, layout.split, config, out)
        return out

    def run_expanded(
        self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec, expand: Expand
    ) -> Tensor:
        rounds = plan.expanded_plan
        assert isinstance(rounds, ExpandedPlan) and spec.value_dim is not None
        rows = cache.keys.view(-1, spec.head_dim)
        states = out = None
        for part in rounds.rounds:
            gathered = rows.index_select(0, part.slots)  # [keys, rank + rope]
            kv = expand(gathered[:, : spec.value_dim].contiguous())
            if out is None:
                v_dim = kv.shape[2] - (q.shape[2] - (spec.head_dim - spec.value_dim))
                out = q.new_empty(*q.shape[:2], v_dim)
                states = empty_states(out) if rounds.has_states else None
            keys = ExpandedKeys(kv, gathered[:, spec.value_dim :], part.tiles)
            expanded_attention(q, keys, states, spec.scale, out)
        assert out is not None, "a part without tokens"
        return out

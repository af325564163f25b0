"""ModelPlan against transformers' own counts, and against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import transformers

from quire.kv.forms import FLOATS
from quire.kv.groups import PageNeeds
from quire.models.kv_cache import cache_of
from quire.models.plan import ModelPlan, count_weights, layer_runs, plan_of
from quire.models.registry import FAMILIES, spec_of
from quire.models.spec import MlaSpec, ModelSpec
from quire.models.tiny_configs import tiny_config
from tests.model.test_tiny import is_eye

PAGE = 16


def spec_for(family: str, **changes: Any) -> ModelSpec:
    return spec_of(tiny_config(family, **changes))


def planned(spec: ModelSpec, context: int, max_inflight: int = 1) -> ModelPlan:
    windows = tuple(dict.fromkeys(spec.windows)) or (None,)
    cache = cache_of(spec, FLOATS["float16"], page_size=PAGE)
    return plan_of(spec, cache, context, PageNeeds(PAGE, windows, max_inflight))


@pytest.mark.parametrize("family", FAMILIES.entries)
def test_weights_are_those_of_transformers(family: str) -> None:
    """Red when a tensor is left out of the count, or counted twice."""
    config = tiny_config(family)
    known = transformers.AutoConfig.for_model(**config)
    model = getattr(transformers, family)(known)
    want = sum(p.numel() for name, p in model.named_parameters() if not is_eye(name))
    buffers = ("e_score_correction_bias",)  # learned, and kept as a buffer
    want += sum(b.numel() for name, b in model.named_buffers() if name.endswith(buffers))
    assert count_weights(spec_of(config)).total == want


def test_active_weights_leave_out_the_experts_not_chosen() -> None:
    spec = spec_for("mixtral")  # 2 of 4 experts of 3 x 32 x 48 in each of 2 layers
    total, active = count_weights(spec)
    assert total - active == 2 * 2 * 3 * 32 * 48
    dense = count_weights(spec_for("llama"))
    assert dense.total == dense.active


def test_layers_in_a_row_are_told_together() -> None:
    windows = (64, 64, None, 64, 64, None)
    spec = replace(spec_for("llama", num_hidden_layers=6), windows=windows)
    runs = [(run.layers, run.attention) for run in layer_runs(spec)]
    assert runs == [("0-1", "window 64"), ("2", "full"), ("3-4", "window 64"), ("5", "full")]
    mixed = layer_runs(spec_for("qwen3_moe", mlp_only_layers=[0]))
    assert [run.feed_forward for run in mixed] == ["gated 48", "experts 3 of 8, each 16"]


def test_groups_hold_their_window() -> None:
    """Red when a windowed layer is charged for the whole context, or a page is not one size."""
    windows = (64, 64, None, 64, 64, None)
    spec = replace(spec_for("llama", num_hidden_layers=6), windows=windows)
    plan = planned(spec, context=1600, max_inflight=32)
    entry = 2 * 2 * 8 * 2  # keys and values of 2 heads of 8, two bytes each
    assert [g.layers for g in plan.groups] == [(2, 5), (0, 1), (3, 4)]
    assert [g.num_pages for g in plan.groups] == [100, 7, 7]
    assert [g.token_bytes for g in plan.groups] == [2 * entry] * 3
    assert plan.page_bytes == 2 * entry * PAGE
    assert plan.token_bytes == 6 * entry and plan.num_pages == 114
    assert plan.expanded_token_bytes == 2 * plan.token_bytes, "four heads instead of two"


def test_a_latent_is_small() -> None:
    """DeepSeek-V3's own numbers: 576 per layer and token where 128 heads would take 40,960."""
    mla = MlaSpec(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128)
    spec = replace(spec_for("llama"), mla=mla, num_heads=128, num_kv_heads=128, head_dim=192)
    plan = planned(spec, context=4096)
    assert plan.token_bytes == spec.num_layers * 576 * 2
    assert plan.expanded_token_bytes == spec.num_layers * 40_960 * 2
    assert plan.runs[0].attention == "latent 512+64"

"""Qwen2-MoE (a shared expert behind a gate) and Qwen3-MoE (a norm on each head of q and k).

Both are their dense siblings with experts in some layers: every `decoder_sparse_step`-th, less
those in `mlp_only_layers`.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import names, qwen
from quire.models.spec import Config, ModelSpec, MoeSpec, RouterSpec

NAMES = names.QWEN_MOE


def spec(config: Config) -> ModelSpec:
    is_qwen3 = config.values.get("model_type") == "qwen3_moe"
    base = qwen.spec(Config({**config.values, "model_type": "qwen3" if is_qwen3 else "qwen2"}))
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    router = RouterSpec(
        config.count(key),
        config.count("num_experts_per_tok"),
        normalize=config.flag("norm_topk_prob"),
        rounds=True,
    )
    moe = MoeSpec(
        router,
        config.count("moe_intermediate_size"),
        shared_ffn_size=0 if is_qwen3 else config.count("shared_expert_intermediate_size"),
        dense_layers=_dense_layers(config, base.num_layers),
    )
    if is_qwen3:
        return replace(base, architecture="qwen3_moe", moe=moe)
    return replace(base, architecture="qwen2_moe", qkv_bias=config.flag("qkv_bias", True), moe=moe)


def _dense_layers(config: Config, num_layers: int) -> frozenset[int]:
    step, named = config.count("decoder_sparse_step", 1), config.ids("mlp_only_layers")
    return frozenset(i for i in range(num_layers) if i in named or (i + 1) % step)

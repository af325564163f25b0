"""DeepSeek-V2 and V3: latent attention, dense layers first, then experts of which one is shared.

V2 scores experts by a softmax, greedily or within the best groups; V3 by sigmoids whose learned
corrections decide who is chosen. Layers for predicting several tokens (V3) are beyond
`num_hidden_layers` and stay on the disk. Moonlight and Kimi-K2 are V3 by their configs.
"""

from __future__ import annotations

import math
from dataclasses import replace

from quire.errors import NotSupported
from quire.models import llama, names
from quire.models.spec import Config, MlaSpec, ModelSpec, MoeSpec, RopeSpec, RouterSpec, rope_spec

NAMES = {
    **{theirs: ours for theirs, ours in names.LLAMA.items() if "self_attn" not in theirs},
    "model.layers.{i}.self_attn.q_proj.weight": "layers.{i}.qkv.weight:q",
    "model.layers.{i}.self_attn.q_a_proj.weight": "layers.{i}.qkv.weight:q",
    "model.layers.{i}.self_attn.q_a_proj.bias": "layers.{i}.qkv.bias:q",
    "model.layers.{i}.self_attn.q_a_layernorm.weight": "layers.{i}.q_norm.weight",
    "model.layers.{i}.self_attn.q_b_proj.weight": "layers.{i}.q_b.weight",
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight": "layers.{i}.qkv.weight:kv",
    "model.layers.{i}.self_attn.kv_a_proj_with_mqa.bias": "layers.{i}.qkv.bias:kv",
    "model.layers.{i}.self_attn.kv_a_layernorm.weight": "layers.{i}.kv_norm.weight",
    "model.layers.{i}.self_attn.kv_b_proj.weight": "layers.{i}.kv_b.weight",
    "model.layers.{i}.self_attn.o_proj.weight": "layers.{i}.out.weight",
    "model.layers.{i}.self_attn.o_proj.bias": "layers.{i}.out.bias",
    "model.layers.{i}.mlp.gate.weight": "layers.{i}.router.weight:experts",
    "model.layers.{i}.mlp.gate.e_score_correction_bias": "layers.{i}.router.correction",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "layers.{i}.experts.up:{e}.gate",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "layers.{i}.experts.up:{e}.up",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "layers.{i}.experts.down:{e}",
    "model.layers.{i}.mlp.experts.gate_up_proj": "layers.{i}.experts.up",
    "model.layers.{i}.mlp.experts.down_proj": "layers.{i}.experts.down",
    "model.layers.{i}.mlp.shared_experts.gate_proj.weight": "layers.{i}.shared.up.weight:gate",
    "model.layers.{i}.mlp.shared_experts.up_proj.weight": "layers.{i}.shared.up.weight:up",
    "model.layers.{i}.mlp.shared_experts.down_proj.weight": "layers.{i}.shared.down.weight",
}


def spec(config: Config) -> ModelSpec:
    is_v3 = "V3" in config.values["architectures"][0]
    _refuse(config)
    mla = MlaSpec(
        q_rank=config.count("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_rank=config.count("kv_lora_rank"),
        rope_dim=config.count("qk_rope_head_dim"),
        nope_dim=config.count("qk_nope_head_dim"),
        v_dim=config.count("v_head_dim"),
        interleaved=config.flag("rope_interleave", True) if is_v3 else True,
    )
    width = mla.nope_dim + mla.rope_dim
    # Some configs say how many kv heads an expanded cache would have; there is none.
    heads = config.count("num_attention_heads")
    plain = {**config.values, "head_dim": width, "num_key_value_heads": heads}
    base = llama.spec(Config({**plain, "attention_bias": False}))
    rope = rope_spec(config, mla.rope_dim, base.max_positions)
    has_bias = config.flag("attention_bias")
    return replace(
        base,
        architecture="deepseek_v3" if is_v3 else "deepseek_v2",
        mla=mla,
        rope=rope,
        qkv_bias=has_bias,
        out_bias=has_bias,
        attn_scale=width**-0.5 * _magnitude(rope) ** 2,
        moe=_moe(config, base.num_layers, is_v3) if config.has("n_routed_experts") else None,
    )


def _moe(config: Config, num_layers: int, is_v3: bool) -> MoeSpec:
    num_experts, top_k = config.count("n_routed_experts"), config.count("num_experts_per_tok")
    scale = config.number("routed_scaling_factor", 1.0)
    if is_v3:
        config.expect("topk_method", ("noaux_tc",), "noaux_tc")
        router = RouterSpec(
            num_experts,
            top_k,
            score=config.expect("scoring_func", ("sigmoid",), "sigmoid"),
            normalize=config.flag("norm_topk_prob", True),
            num_groups=config.count("n_group", 1),
            top_groups=config.count("topk_group", 1),
            scale=scale,
            correction=True,
        )
    else:
        config.expect("scoring_func", ("softmax",), "softmax")
        method = config.expect("topk_method", ("greedy", "group_limited_greedy"), "greedy")
        is_grouped = method == "group_limited_greedy"
        router = RouterSpec(
            num_experts,
            top_k,
            normalize=False,
            num_groups=config.count("n_group", 1) if is_grouped else 1,
            top_groups=config.count("topk_group", 1) if is_grouped else 1,
            group_best=1,
            scale=scale,
        )
    ffn_size = config.count("moe_intermediate_size")
    num_shared = config.count("n_shared_experts") if config.has("n_shared_experts") else 0
    step = config.count("moe_layer_freq", 1)
    num_dense = config.count("first_k_dense_replace", 0, least=0)
    dense = (i for i in range(num_layers) if i < num_dense or i % step)
    return MoeSpec(
        router,
        ffn_size,
        shared_ffn_size=num_shared * ffn_size,
        shared_gate=False,
        dense_layers=frozenset(dense),
    )


def _refuse(config: Config) -> None:
    if config.flag("attention_bias") and not config.has("q_lora_rank"):
        raise NotSupported(
            "attention_bias=true without q_lora_rank gives keys a bias and queries none; no"
            " published DeepSeek has that"
        )
    if "V3" not in config.values["architectures"][0] and config.flag("norm_topk_prob"):
        raise NotSupported(
            "norm_topk_prob=true in a DeepSeek-V2 means different things to its implementations;"
            " no published checkpoint sets it"
        )


def _magnitude(rope: RopeSpec) -> float:
    """What yarn multiplies queries and keys by, each, beyond what it does to cos and sin."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0

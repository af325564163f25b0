"""Checkpoint names -> our parameters, as plain tables.

A table line maps a Hugging Face tensor name to one of ours; `{i}` stands for the layer, `{e}` for
the expert, a part after a colon for a slice of a fused weight (q|k|v), and a trailing `^T` for a
stored transpose.
"""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    name: str  # ours
    part: str | None
    transposed: bool


def target_of(line: str) -> Target:
    transposed = line.endswith("^T")
    name, _, part = line.removesuffix("^T").partition(":")
    return Target(name, part or None, transposed)


def expand(table: dict[str, str], num_layers: int, num_experts: int = 0) -> dict[str, Target]:
    """Every concrete checkpoint name of a model with this many layers and experts."""
    names: dict[str, Target] = {}
    for theirs, ours in table.items():
        for i in range(num_layers) if "{i}" in theirs else (0,):
            for e in range(num_experts) if "{e}" in theirs else (0,):
                name, target = (
                    line.replace("{i}", str(i)).replace("{e}", str(e)) for line in (theirs, ours)
                )
                names[name] = target_of(target)
    return names


LLAMA = {
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm.weight",
    "model.layers.{i}.self_attn.q_proj.weight": "layers.{i}.qkv.weight:q",
    "model.layers.{i}.self_attn.k_proj.weight": "layers.{i}.qkv.weight:k",
    "model.layers.{i}.self_attn.v_proj.weight": "layers.{i}.qkv.weight:v",
    "model.layers.{i}.self_attn.q_proj.bias": "layers.{i}.qkv.bias:q",
    "model.layers.{i}.self_attn.k_proj.bias": "layers.{i}.qkv.bias:k",
    "model.layers.{i}.self_attn.v_proj.bias": "layers.{i}.qkv.bias:v",
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.k_norm.weight",
    "model.layers.{i}.self_attn.o_proj.weight": "layers.{i}.out.weight",
    "model.layers.{i}.self_attn.o_proj.bias": "layers.{i}.out.bias",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.mlp.gate_proj.weight": "layers.{i}.up.weight:gate",
    "model.layers.{i}.mlp.up_proj.weight": "layers.{i}.up.weight:up",
    "model.layers.{i}.mlp.gate_proj.bias": "layers.{i}.up.bias:gate",
    "model.layers.{i}.mlp.up_proj.bias": "layers.{i}.up.bias:up",
    "model.layers.{i}.mlp.down_proj.weight": "layers.{i}.down.weight",
    "model.layers.{i}.mlp.down_proj.bias": "layers.{i}.down.bias",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}

MIXTRAL = {
    **LLAMA,
    "model.layers.{i}.block_sparse_moe.gate.weight": "layers.{i}.router.weight:experts",
    "model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight": "layers.{i}.experts.up:{e}.gate",
    "model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight": "layers.{i}.experts.up:{e}.up",
    "model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight": "layers.{i}.experts.down:{e}",
    # As GGUF files are read, and as transformers holds it in memory: all experts in one tensor.
    "model.layers.{i}.mlp.gate.weight": "layers.{i}.router.weight:experts",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "layers.{i}.experts.up:{e}.gate",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "layers.{i}.experts.up:{e}.up",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "layers.{i}.experts.down:{e}",
    "model.layers.{i}.mlp.experts.gate_up_proj": "layers.{i}.experts.up",
    "model.layers.{i}.mlp.experts.down_proj": "layers.{i}.experts.down",
}

QWEN_MOE = {
    **LLAMA,
    "model.layers.{i}.mlp.gate.weight": "layers.{i}.router.weight:experts",
    "model.layers.{i}.mlp.experts.{e}.gate_proj.weight": "layers.{i}.experts.up:{e}.gate",
    "model.layers.{i}.mlp.experts.{e}.up_proj.weight": "layers.{i}.experts.up:{e}.up",
    "model.layers.{i}.mlp.experts.{e}.down_proj.weight": "layers.{i}.experts.down:{e}",
    "model.layers.{i}.mlp.experts.gate_up_proj": "layers.{i}.experts.up",
    "model.layers.{i}.mlp.experts.down_proj": "layers.{i}.experts.down",
    "model.layers.{i}.mlp.shared_expert_gate.weight": "layers.{i}.router.weight:shared",
    "model.layers.{i}.mlp.shared_expert.gate_proj.weight": "layers.{i}.shared.up.weight:gate",
    "model.layers.{i}.mlp.shared_expert.up_proj.weight": "layers.{i}.shared.up.weight:up",
    "model.layers.{i}.mlp.shared_expert.down_proj.weight": "layers.{i}.shared.down.weight",
}

_FUSED_IN_PHI3 = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
PHI3 = {
    **{
        theirs: ours
        for theirs, ours in LLAMA.items()
        if not any(part in theirs for part in _FUSED_IN_PHI3)
    },
    "model.layers.{i}.self_attn.qkv_proj.weight": "layers.{i}.qkv.weight",
    "model.layers.{i}.mlp.gate_up_proj.weight": "layers.{i}.up.weight",
}

OLMO2 = {
    **{theirs: ours for theirs, ours in LLAMA.items() if "layernorm" not in theirs},
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attn_norm.weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
}

BITNET = {
    **LLAMA,
    "model.layers.{i}.self_attn.attn_sub_norm.weight": "layers.{i}.attn_sub_norm.weight",
    "model.layers.{i}.mlp.ffn_sub_norm.weight": "layers.{i}.mlp_sub_norm.weight",
}

GPT2 = {
    "transformer.wte.weight": "embed.weight",
    "transformer.wpe.weight": "positions.weight",
    "transformer.h.{i}.ln_1.weight": "layers.{i}.attn_norm.weight",
    "transformer.h.{i}.ln_1.bias": "layers.{i}.attn_norm.bias",
    "transformer.h.{i}.attn.c_attn.weight": "layers.{i}.qkv.weight^T",
    "transformer.h.{i}.attn.c_attn.bias": "layers.{i}.qkv.bias",
    "transformer.h.{i}.attn.c_proj.weight": "layers.{i}.out.weight^T",
    "transformer.h.{i}.attn.c_proj.bias": "layers.{i}.out.bias",
    "transformer.h.{i}.ln_2.weight": "layers.{i}.mlp_norm.weight",
    "transformer.h.{i}.ln_2.bias": "layers.{i}.mlp_norm.bias",
    "transformer.h.{i}.mlp.c_fc.weight": "layers.{i}.up.weight^T",
    "transformer.h.{i}.mlp.c_fc.bias": "layers.{i}.up.bias",
    "transformer.h.{i}.mlp.c_proj.weight": "layers.{i}.down.weight^T",
    "transformer.h.{i}.mlp.c_proj.bias": "layers.{i}.down.bias",
    "transformer.ln_f.weight": "norm.weight",
    "transformer.ln_f.bias": "norm.bias",
    "lm_head.weight": "head.weight",
}

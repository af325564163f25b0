"""Checkpoint names -> our parameters, as plain tables.

A table line maps a Hugging Face tensor name to one of ours; `{i}` stands for the layer, a part
after a colon for a slice of a fused weight (q|k|v), and a trailing `^T` for a stored transpose.
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


def expand(table: dict[str, str], num_layers: int) -> dict[str, Target]:
    """Every concrete checkpoint name of a model with this many layers."""
    names: dict[str, Target] = {}
    for theirs, ours in table.items():
        layers = range(num_layers) if "{i}" in theirs else (0,)
        for i in layers:
            names[theirs.replace("{i}", str(i))] = target_of(ours.replace("{i}", str(i)))
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
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.q_norm",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.k_norm",
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

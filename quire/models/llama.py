"""Llama 2 and 3, SmolLM2 and everything else that calls itself LlamaForCausalLM."""

from __future__ import annotations

from quire.models import names
from quire.models.spec import Config, ModelSpec, head_counts, rope_spec

NAMES = names.LLAMA


def spec(config: Config) -> ModelSpec:
    heads, kv_heads, head_dim = head_counts(config)
    max_positions = config.count("max_position_embeddings", 2048)
    config.expect("hidden_act", ("silu",), "silu")
    bias = config.flag("attention_bias")
    return ModelSpec(
        architecture="llama",
        hidden_size=config.count("hidden_size"),
        num_layers=config.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=config.count("intermediate_size"),
        vocab_size=config.count("vocab_size"),
        max_positions=max_positions,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        rope=rope_spec(config, head_dim, max_positions),
        tied=config.flag("tie_word_embeddings"),
        dtype=config.dtype,
        bos_id=next(iter(config.ids("bos_token_id")), None),
        eos_ids=config.ids("eos_token_id"),
    )

"""GPT-2: learned positions, LayerNorm, a plain GELU MLP, biases everywhere, transposed weights."""

from __future__ import annotations

from quire.models import names
from quire.models.spec import Config, ModelSpec

NAMES = names.GPT2


def spec(config: Config) -> ModelSpec:
    hidden, heads = config.count("n_embd"), config.count("n_head")
    if hidden % heads:
        raise config.error("n_head", f"a divisor of n_embd={hidden}")
    config.expect("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    return ModelSpec(
        architecture="gpt2",
        hidden_size=hidden,
        num_layers=config.count("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=config.count("n_inner", 4 * hidden),
        vocab_size=config.count("vocab_size"),
        max_positions=config.count("n_positions", 1024),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        mlp="plain",
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=config.flag("tie_word_embeddings", True),
        dtype=config.dtype,
        bos_id=next(iter(config.ids("bos_token_id")), None),
        eos_ids=config.ids("eos_token_id"),
    )

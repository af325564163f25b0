"""Gemma 2 and 3: Gemma with norms on both sides of each block and windows in most layers.

Gemma 2 bends the logits of attention and of the vocabulary below a cap. Gemma 3 norms each head of
q and k instead, and turns windowed layers by another rotation. The language model of a Gemma 3 that
also sees images is read out of it (`text_config`); its other parts are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.errors import CheckpointError
from quire.models import gemma1, names
from quire.models.spec import Config, ModelSpec, RopeSpec, rope_spec
from quire.models.windows import FULL, LOCAL, windows_of

# What transformers assumes where a config is silent, as those of released models are.
DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
FULL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3

_TEXT = {
    **{theirs: ours for theirs, ours in names.LLAMA.items() if "layernorm" not in theirs},
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.attn_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attn_out_norm.weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers.{i}.mlp_norm.weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers.{i}.mlp_out_norm.weight",
}
NAMES = {
    **_TEXT,
    # Beside a vision tower: as released, and as transformers saves it now.
    **{f"language_model.{theirs}": ours for theirs, ours in _TEXT.items()},
    **{f"model.language_{theirs}": ours for theirs, ours in _TEXT.items()},
}


def spec(config: Config) -> ModelSpec:
    if config.has("text_config"):
        config = Config({**_inherited(config.values), **config.nested("text_config").values})
    return _gemma2(config) if config.values.get("model_type") == "gemma2" else _gemma3(config)


def _inherited(outer: Mapping[str, Any]) -> dict[str, Any]:
    """What a config with parts says of all of them."""
    known = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    return {key: outer[key] for key in known if outer.get(key) is not None}


def _gemma2(config: Config) -> ModelSpec:
    config = Config({**GEMMA2_DEFAULTS, **config.values})
    base = _both(config)
    windows = windows_of(config, base.num_layers, lambda layer: layer % 2 == 0)
    return replace(base, architecture="gemma2", windows=windows)


def _gemma3(config: Config) -> ModelSpec:
    config = Config({**GEMMA3_DEFAULTS, **config.values})
    if config.flag("use_bidirectional_attention"):
        raise CheckpointError(
            "config.json: got use_bidirectional_attention=true, want false: only causal attention"
            " is here, so embedding models of this kind do not run"
        )
    full, local = _ropes(config)
    base = _both(Config({**config.values, "rope_parameters": None, "rope_scaling": None}))
    pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 6))
    windows = windows_of(config, base.num_layers, lambda layer: (layer + 1) % pattern != 0)
    return replace(
        base, architecture="gemma3", qk_norm="head", windows=windows, rope=full, local_rope=local
    )


def _both(config: Config) -> ModelSpec:
    base = gemma1.spec(config)
    cap, final = "attn_logit_softcapping", "final_logit_softcapping"
    return replace(
        base,
        norm_both=True,
        attn_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attn_softcap=config.number(cap, 1.0) if config.has(cap) else None,
        logit_softcap=config.number(final, 1.0) if config.has(final) else None,
    )


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """Rotations of full and of windowed layers, in both spellings: an object by type of layer, or
    two bases of which the first alone is scaled."""
    nested = config.nested("rope_parameters")
    if FULL in nested.values or LOCAL in nested.values:
        full, local = dict(nested.nested(FULL).values), dict(nested.nested(LOCAL).values)
    else:
        full, local = dict(config.nested("rope_scaling").values or nested.values), {}
    full.setdefault("rope_theta", config.number("rope_theta", FULL_THETA))
    local.setdefault("rope_theta", config.number("rope_local_base_freq", LOCAL_THETA))
    head_dim, max_positions = config.count("head_dim"), config.count("max_position_embeddings")
    ropes = [
        rope_spec(Config({**config.values, "rope_parameters": own}), head_dim, max_positions)
        for own in (full, local)
    ]
    return ropes[0], ropes[1]

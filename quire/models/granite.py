"""Granite 3: Llama with four multipliers, on embeddings, on what blocks add, in attention and on
the logits."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec

NAMES = names.LLAMA


def spec(config: Config) -> ModelSpec:
    return replace(
        llama.spec(config),
        architecture="granite",
        attn_scale=config.number("attention_multiplier", 1.0),
        embed_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )

"""Gemma: Llama with wide heads, GELU gates, scaled embeddings and norms whose weights count from
one. Gemma 2 and 3 build on it in `gemma.py`."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec

NAMES = names.LLAMA

# The first release says "gelu" and means its tanh form.
ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")


def spec(config: Config) -> ModelSpec:
    for key in ("hidden_act", "hidden_activation"):
        config.expect(key, ACTIVATIONS, ACTIVATIONS[0])
    tied = config.flag("tie_word_embeddings", True)
    base = llama.spec(Config({**config.values, "hidden_act": "silu"}))
    return replace(
        base,
        architecture="gemma",
        activation="gelu",
        tied=tied,
        norm_offset=1.0,
        embed_scale=base.hidden_size**0.5,
    )

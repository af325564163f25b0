"""Mistral: Llama with a sliding window in some versions, and an explicit head size in others."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec

NAMES = names.LLAMA


def spec(config: Config) -> ModelSpec:
    window = config.count("sliding_window") if config.has("sliding_window") else None
    return replace(llama.spec(config), architecture="mistral", sliding_window=window)

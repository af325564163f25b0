"""Mistral: Llama with a sliding window in some versions, and an explicit head size in others."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec
from quire.models.windows import windows_of

NAMES = names.LLAMA


def spec(config: Config) -> ModelSpec:
    base = llama.spec(config)
    windows = windows_of(config, base.num_layers, lambda _: True)
    return replace(base, architecture="mistral", windows=windows)

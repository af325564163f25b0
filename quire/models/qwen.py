"""Qwen2 and Qwen2.5 (biases on q, k, v) and Qwen3 (a norm on each head of q and k)."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec

NAMES = names.LLAMA


def spec(config: Config) -> ModelSpec:
    window = None
    if config.flag("use_sliding_window") and config.has("sliding_window"):
        window = config.count("sliding_window")
    base = replace(llama.spec(config), sliding_window=window)
    if config.values.get("model_type") == "qwen3":
        return replace(base, architecture="qwen3", qk_norm="head")
    return replace(base, architecture="qwen2", qkv_bias=True, out_bias=False)

"""Qwen2 and Qwen2.5 (biases on q, k, v) and Qwen3 (a norm on each head of q and k). Both may have
a window in their later layers."""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec
from quire.models.windows import windows_of

NAMES = names.LLAMA


def spec(config: Config) -> ModelSpec:
    base = llama.spec(config)
    if config.flag("use_sliding_window"):
        first = config.count("max_window_layers", 28, least=0)
        windows = windows_of(config, base.num_layers, lambda layer: layer >= first)
        base = replace(base, windows=windows)
    if config.values.get("model_type") == "qwen3":
        return replace(base, architecture="qwen3", qk_norm="head")
    return replace(base, architecture="qwen2", qkv_bias=True, out_bias=False)

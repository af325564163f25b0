"""gpt-oss: experts with biases and a clamped gate, heads with sinks, every other layer windowed.

The router's weights are a softmax over the chosen scores alone, which is the softmax over all of
them made to sum to one. How the experts are stored is `load/gpt_oss.py`'s; the names here are those
it gives them.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec, MoeSpec, RouterSpec
from quire.models.windows import windows_of

_EXPERT = "model.layers.{i}.mlp.experts.{e}"
NAMES = {
    **names.LLAMA,
    "model.layers.{i}.self_attn.sinks": "layers.{i}.sinks",
    "model.layers.{i}.mlp.router.weight": "layers.{i}.router.weight:experts",
    "model.layers.{i}.mlp.router.bias": "layers.{i}.router.bias:experts",
    f"{_EXPERT}.gate_proj.weight": "layers.{i}.experts.up:{e}.gate",
    f"{_EXPERT}.up_proj.weight": "layers.{i}.experts.up:{e}.up",
    f"{_EXPERT}.down_proj.weight": "layers.{i}.experts.down:{e}",
    f"{_EXPERT}.gate_proj.bias": "layers.{i}.experts.up_bias:{e}.gate",
    f"{_EXPERT}.up_proj.bias": "layers.{i}.experts.up_bias:{e}.up",
    f"{_EXPERT}.down_proj.bias": "layers.{i}.experts.down_bias:{e}",
}

# What a config that leaves them out means.
_DEFAULTS = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "sliding_window": 128,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def spec(config: Config) -> ModelSpec:
    given = {key: value for key, value in config.values.items() if value is not None}
    full = Config({**_DEFAULTS, **given})
    base = llama.spec(full)
    router = RouterSpec(
        config.count("num_local_experts"),
        config.count("num_experts_per_tok", 4),
        rounds=True,
        bias=True,
    )
    moe = MoeSpec(
        router,
        base.ffn_size,
        expert_bias=True,
        swiglu_limit=config.number("swiglu_limit", 7.0),
        swiglu_alpha=config.number("swiglu_alpha", 1.702),
    )
    windows = windows_of(full, base.num_layers, lambda layer: layer % 2 == 0)
    return replace(base, architecture="gpt_oss", moe=moe, sinks=True, windows=windows)

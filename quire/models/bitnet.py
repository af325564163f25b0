"""BitNet b1.58: Llama with squared ReLU and a norm before the out and down projections.

Its weights are ternary: -1, 0 or 1 times one number per matrix. Checkpoints hold them packed, or as
plain numbers to be rounded (`load/ternary.py`), and then activations go into each projection
rounded to eight bits per token (`ops/int8_inputs.py`). A config without `quantization_config` is a
plain model.
"""

from __future__ import annotations

from dataclasses import replace

from quire.models import llama, names
from quire.models.spec import Config, ModelSpec

NAMES = names.BITNET


def spec(config: Config) -> ModelSpec:
    activation = config.expect("hidden_act", ("relu2", "silu"), "relu2")
    base = llama.spec(Config({**config.values, "hidden_act": "silu"}))
    rope = base.rope
    if rope is not None and not config.has("rope_theta") and not config.has("rope_parameters"):
        rope = replace(rope, theta=DEFAULT_THETA)
    return replace(
        base,
        architecture="bitnet",
        norm_eps=config.number("rms_norm_eps", 1e-5),
        activation=activation,
        sub_norms=True,
        rope=rope,
    )


DEFAULT_THETA = 500_000.0

"""Hugging Face architecture string -> family module (its `spec` function and `NAMES` table)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError
from quire.models.names import Target, expand
from quire.models.spec import Config, ModelSpec
from quire.registry import Registry

FAMILIES = Registry(
    "model architecture",
    {
        "LlamaForCausalLM": "quire.models.llama",
        "MistralForCausalLM": "quire.models.mistral",
        "Qwen2ForCausalLM": "quire.models.qwen",
        "Qwen3ForCausalLM": "quire.models.qwen",
        "Phi3ForCausalLM": "quire.models.phi3",
        "Olmo2ForCausalLM": "quire.models.olmo2",
        "GraniteForCausalLM": "quire.models.granite",
        "MixtralForCausalLM": "quire.models.mixtral",
        "Qwen2MoeForCausalLM": "quire.models.qwen_moe",
        "Qwen3MoeForCausalLM": "quire.models.qwen_moe",
        "GPT2LMHeadModel": "quire.models.gpt2",
    },
)


def architecture_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json: got architectures={names!r}, want a list with one class name such as"
            " 'LlamaForCausalLM'"
        )
    return names[0]


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    family = FAMILIES.get(architecture_of(config))
    spec: ModelSpec = family.spec(Config(config))
    return spec


def names_of(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Target]:
    family = FAMILIES.get(architecture_of(config))
    num_experts = spec.moe.router.num_experts if spec.moe else 0
    return expand(family.NAMES, spec.num_layers, num_experts)

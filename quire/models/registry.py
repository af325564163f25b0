"""Hugging Face architecture string -> family module (its `spec` function and `NAMES` table)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import CheckpointError, shown
from quire.models.names import Target, expand
from quire.models.sequence_head import NAMES as HEAD_NAMES
from quire.models.sequence_head import is_classifier, language_model_of, with_head
from quire.models.spec import Config, ModelSpec, check_sizes
from quire.quant.methods import method_of
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
        "GptOssForCausalLM": "quire.models.gpt_oss",
        "DeepseekV2ForCausalLM": "quire.models.deepseek",
        "DeepseekV3ForCausalLM": "quire.models.deepseek",
        "GemmaForCausalLM": "quire.models.gemma1",
        "Gemma2ForCausalLM": "quire.models.gemma",
        "Gemma3ForCausalLM": "quire.models.gemma",
        "Gemma3ForConditionalGeneration": "quire.models.gemma",
        "GPT2LMHeadModel": "quire.models.gpt2",
        "BitNetForCausalLM": "quire.models.bitnet",
    },
)


def architecture_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json: got architectures={shown(names)}, want a list with one class name such"
            " as 'LlamaForCausalLM'"
        )
    return names[0]


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    architecture = architecture_of(config)
    method_of(config)  # weights that nothing here reads are refused before anything else
    spec: ModelSpec = _family(architecture).spec(Config(config))
    return check_sizes(with_head(spec, config) if is_classifier(architecture) else spec)


def names_of(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Target]:
    num_experts = spec.moe.router.num_experts if spec.moe else 0
    return expand(_table(config, spec), spec.num_layers, num_experts)


def layer_names_of(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Target]:
    """As `names_of`, without the names that stand for one expert each."""
    return expand(_table(config, spec), spec.num_layers)


def _table(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, str]:
    family = _family(architecture_of(config))
    return {**family.NAMES, **(HEAD_NAMES if spec.num_labels else {})}


def _family(architecture: str) -> Any:
    return FAMILIES.get(language_model_of(architecture))

"""Tiny members of every family: a config.json each, small enough to run anywhere in a moment.

Each has what makes its family different (groups of heads, windows, experts, norms), in the smallest
numbers that still show it. `tiny.py` writes folders of them with random weights. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import NotSupported
from quire.models.registry import FAMILIES
from quire.models.sequence_head import is_classifier, language_model_of

NUM_LABELS = 3
NUM_SPECIAL = 2  # begin and end, before the 256 bytes of the tiny tokenizer
VOCAB_SIZE = NUM_SPECIAL + 256

BASE: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_GEMMA: Mapping[str, Any] = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
_GEMMA3: Mapping[str, Any] = {
    **_GEMMA,
    "num_hidden_layers": 6,
    "sliding_window": 20,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {
        "sliding_attention": dict(_ROPE),
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
_DEEPSEEK: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

# Architecture -> model_type, and what differs from BASE.
MEMBERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen3ForCausalLM": ("qwen3", {"head_dim": 16}),
    "Phi3ForCausalLM": ("phi3", {"sliding_window": None, "pad_token_id": None}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "GraniteForCausalLM": (
        "granite",
        {
            "tie_word_embeddings": True,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "MixtralForCausalLM": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "GemmaForCausalLM": (
        "gemma",
        {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    ),
    "Gemma2ForCausalLM": (
        "gemma2",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": ("gemma3_text", _GEMMA3),
    "DeepseekV2ForCausalLM": (
        "deepseek_v2",
        {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek_v3",
        {**_DEEPSEEK, "q_lora_rank": 24, "norm_topk_prob": True, "rope_interleave": True},
    ),
    "GptOssForCausalLM": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": dict(_ROPE),
        },
    ),
    "BitNetForCausalLM": ("bitnet", {"hidden_act": "relu2"}),
}
# Configs that are not BASE with changes.
_GPT2: Mapping[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
_GEMMA3_WITH_EYES: Mapping[str, Any] = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", **BASE, **_GEMMA3},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}
WHOLE: Mapping[str, Mapping[str, Any]] = {
    "GPT2LMHeadModel": _GPT2,
    "Gemma3ForConditionalGeneration": _GEMMA3_WITH_EYES,
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny member, named by architecture or by model_type.

    >>> tiny_config("llama", num_hidden_layers=1)["architectures"]
    ['LlamaForCausalLM']
    """
    architecture = _architecture(family)
    config = _member(architecture)
    if is_classifier(architecture):
        config |= labels(NUM_LABELS)
    return {"architectures": [architecture], **config, **changes}


def tiny_families() -> tuple[str, ...]:
    """Every architecture that the registry knows and a tiny member is there for."""
    return tuple(name for name in FAMILIES.entries if _has_member(name))


def labels(count: int) -> dict[str, Any]:
    """How a config.json says that there are so many labels."""
    names = [f"LABEL_{i}" for i in range(count)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _member(architecture: str) -> dict[str, Any]:
    """Without its `architectures`; a classifier is its language model's member."""
    name = language_model_of(architecture)
    if name in WHOLE:
        return dict(WHOLE[name])
    model_type, changes = MEMBERS[name]
    return {"model_type": model_type, **BASE, **changes}


def _has_member(architecture: str) -> bool:
    name = language_model_of(architecture)
    return name in MEMBERS or name in WHOLE


def _architecture(family: str) -> str:
    by_type = {model_type: name for name, (model_type, _) in MEMBERS.items()}
    by_type |= {str(config["model_type"]): name for name, config in WHOLE.items()}
    architecture = by_type.get(family, family)
    if not _has_member(architecture):
        raise NotSupported(
            f"no tiny member of {family!r}; add a line to MEMBERS in quire/models/tiny_configs.py"
            f" (there are {', '.join(sorted(by_type))})"
        )
    return architecture

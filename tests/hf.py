"""The oracle nobody here wrote: tiny random Hugging Face models, in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from quire.engine.build import Engine, build_engine
from quire.flat_args import args_of
from quire.load.checkpoint import Stored

VOCAB = 199


class StateDictCheckpoint:
    """A Hugging Face model in memory, seen as a checkpoint."""

    files: Sequence[Path] = ()

    def __init__(self, model: Any) -> None:
        self.config: Mapping[str, Any] = {
            **model.config.to_dict(),
            "architectures": [type(model).__name__],
        }
        self.tensors: dict[str, Tensor] = dict(model.state_dict())

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def stored(self, name: str) -> Stored:
        tensor = self.tensors[name]
        return Stored(str(tensor.dtype), tensor.numel() * tensor.element_size())

    def packed(self, name: str, rows: slice | None = None) -> None:
        return None


def _llama_like(cls: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{cls}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **changes,
        }
    )
    return getattr(transformers, f"{cls}ForCausalLM")(config)


def _gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(
        **{
            "vocab_size": VOCAB,
            "n_embd": 48,
            "n_layer": 3,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
    )
    return transformers.GPT2LMHeadModel(config)


GEMMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 13,
}


def _gemma3_config(**changes: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **{
            **GEMMA_SIZES,
            "query_pre_attn_scalar": 24,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **changes,
        }
    )


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


FAMILIES: dict[str, Any] = {
    "llama-gqa": lambda: _llama_like("Llama", head_dim=16),
    "llama-packable": lambda: _llama_like(
        "Llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
    ),
    "llama-mha-bias": lambda: _llama_like(
        "Llama", num_key_value_heads=6, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama-mqa-tied": lambda: _llama_like(
        "Llama", num_key_value_heads=1, tie_word_embeddings=True, head_dim=16
    ),
    "llama-linear": lambda: _llama_like("Llama", **rope("linear", factor=4.0)),
    "llama-dynamic": lambda: _llama_like("Llama", **rope("dynamic", factor=4.0)),
    "llama-llama3": lambda: _llama_like(
        "Llama",
        **rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": lambda: _llama_like(
        "Llama", **rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-yarn-mscale": lambda: _llama_like(
        "Llama",
        **rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.7,
            mscale_all_dim=0.5,
            beta_fast=24.0,
            beta_slow=2.0,
        ),
    ),
    "mistral": lambda: _llama_like("Mistral", sliding_window=None, head_dim=12),
    "qwen2": lambda: _llama_like("Qwen2"),
    "qwen3": lambda: _llama_like("Qwen3", head_dim=16),
    "phi3": lambda: _llama_like("Phi3", sliding_window=None),
    "phi3-longrope": lambda: _llama_like(
        "Phi3",
        max_position_embeddings=1024,
        original_max_position_embeddings=256,
        **rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.2, 1.5],
            long_factor=[1.0, 3.0, 9.0],
        ),
    ),
    "olmo2": lambda: _llama_like("Olmo2"),
    "olmo2-16": lambda: _llama_like(
        "Olmo2", head_dim=16, num_attention_heads=3, num_key_value_heads=1
    ),
    "granite": lambda: _llama_like(
        "Granite",
        head_dim=16,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        residual_multiplier=0.22,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    "mixtral": lambda: _llama_like("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-16": lambda: _llama_like("Mixtral", num_local_experts=16, head_dim=16),
    "qwen2-moe": lambda: _llama_like(
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=56,
    ),
    "qwen2-moe-16": lambda: _llama_like(
        "Qwen2Moe",
        num_attention_heads=3,
        num_key_value_heads=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "qwen3-moe": lambda: _llama_like(
        "Qwen3Moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    # A dense layer by name, one by the step, and weights that do not sum to one.
    "qwen3-moe-mixed": lambda: _llama_like(
        "Qwen3Moe",
        head_dim=16,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    ),
    "mistral-window": lambda: _llama_like("Mistral", sliding_window=11, head_dim=16),
    "phi3-window": lambda: _llama_like("Phi3", sliding_window=17),
    "qwen2-window": lambda: _llama_like(
        "Qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "gemma": lambda: _llama_like("Gemma", head_dim=16),
    "gemma2": lambda: _llama_like(
        "Gemma2",
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=13,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=7.0,
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(_gemma3_config()),
    "gpt2": lambda: _gpt2(n_head=4),
    "gpt2-16": lambda: _gpt2(n_head=3),
}

SPARSE = ("mixtral", "qwen2-moe", "qwen3-moe", "qwen3-moe-mixed")


def tiny_model(family: str, seed: int = 0) -> Any:
    """Weights large enough that logits differ clearly between tokens."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def tiny_engine(model: Any, **changes: Any) -> Engine:
    args = args_of(
        {
            "device": "cpu",
            "dtype": "float32",
            "page_size": 4,
            "kv_cache_memory": 1 << 22,
            "max_model_len": 256,
            "max_num_seqs": 8,
            **changes,
        }
    )
    return build_engine(args, StateDictCheckpoint(model))


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Plain full recomputation each step: the simplest oracle there is."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]

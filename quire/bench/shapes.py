"""Shapes: the configurations of well-known models, to be filled with random weights.

Speed depends on the shapes of the weights and not on what is in them, so a benchmark needs a
config.json and neither a download nor a disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import BadRequest

Config = Mapping[str, Any]

_SHARED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "head_dim": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_QWEN3 = _SHARED | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "use_sliding_window": False,
}

SHAPES: dict[str, Config] = {
    "8b": _SHARED  # Llama 3.1
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "14b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
}


def shape_named(name: str) -> Config:
    if name not in SHAPES:
        raise BadRequest(f"got shape {name!r}, known: {', '.join(SHAPES)}")
    return SHAPES[name]


def shrunk(config: Config) -> Config:
    """The same family at a size any machine runs in no time."""
    return {
        **config,
        "torch_dtype": "float32",
        "hidden_size": 32,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
    }


def write_shape(config: Config, folder: Path) -> str:
    """A folder to give to `LLM` with load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return str(folder)

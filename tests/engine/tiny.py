"""A tiny model folder, made here: random weights large enough that tokens differ clearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.text.tiny_tokenizers import byte_level

BOS, EOS, PAD = 0, 1, 2  # as tiny_tokenizers orders its special tokens

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def random_llama(**changes: Any) -> Any:
    """A transformers Llama; `changes` are fields of its config."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": byte_level().get_vocab_size(),
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            **changes,
        }
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def save_tiny_folder(folder: Path, model: Any = None) -> None:
    (model or random_llama()).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(special))

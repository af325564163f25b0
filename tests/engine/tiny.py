"""A tiny model folder, made here: random weights large enough that tokens differ clearly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.quant.rtn import RtnForm
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


def save_rounded_folder(source: Path, folder: Path, form: str) -> None:
    """As `source`, its matrices rounded to `form` and in floats again."""
    asked = RtnForm.parse(form)
    eight = replace(asked, bits=8)  # of embeddings and heads
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            is_head = "lm_head" in name or "embed" in name
            made = (eight if is_head else asked).of(tensor)
            tensors[name] = tensor if made is None else made.dequantize()
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

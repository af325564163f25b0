"""The files beside the weights: tokenizer, templates, generation config; and config.json itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.compress.source import Source

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "vocab.json",
    "vocab.txt",
)
SAID_BEFORE = ("quantization_config", "compression_config")


def files_of(source: Source) -> dict[str, bytes]:
    """By name: copies from a folder, made anew from a GGUF file."""
    if source.path.is_dir():
        found = {name: source.path / name for name in COPIED}
        licences = {path.name: path for path in source.path.glob("LICENSE*")}
        return {n: p.read_bytes() for n, p in (found | licences).items() if p.is_file()}
    tokenizer = source.tokenizer
    if tokenizer is None:
        return {}
    words: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
    }
    words = {key: value for key, value in words.items() if value is not None}
    ends = {"eos_token_id": list(tokenizer.eos_ids)}
    return {
        "tokenizer.json": tokenizer.to_json().encode(),
        "tokenizer_config.json": json.dumps(words, ensure_ascii=False, indent=2).encode(),
        "generation_config.json": json.dumps(ends, indent=2).encode(),
    }


def config_of(source: Source, said: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the model that is written."""
    config = {key: value for key, value in source.config.items() if key not in SAID_BEFORE}
    dtype = str(source.dtype).removeprefix("torch.")
    config |= {key: dtype for key in ("torch_dtype", "dtype") if key in config}
    config.setdefault("torch_dtype", dtype)
    return {**config, "quantization_config": dict(said)} if said else config

"""A model folder small enough for a test to write: the tiny Llama's config and a byte tokenizer."""

from __future__ import annotations

from pathlib import Path

from quire.models.tiny import write_config
from quire.models.tiny_configs import tiny_config

CONFIG = tiny_config("llama")


def write_tiny_folder(folder: Path, *, tokenizer: bool = True, **changes: object) -> Path:
    """Use it with load_format='dummy': there are no weights."""
    return write_config(tiny_config("llama", **changes), folder, tokenizer=tokenizer)

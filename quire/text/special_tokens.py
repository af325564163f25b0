"""What a model folder says about its special tokens and chat templates, gathered in one record.

The facts are spread over tokenizer_config.json, special_tokens_map.json, generation_config.json,
config.json and template files, and older models lack half of them. This module only reads;
`tokenizer.py` turns names into ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import CheckpointError
from quire.jsonfile import read_object_if_any

MAX_TEMPLATE_BYTES = 2_000_000
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens by their text, ids that end a generation, and templates by name."""

    texts: Mapping[str, str] = field(default_factory=dict)  # "bos_token" -> "<s>"
    more_texts: tuple[str, ...] = ()  # special, without a role of their own
    eos_ids: tuple[int, ...] = ()  # from the generation and model configs
    add_bos: bool | None = None  # None: as the tokenizer's own post-processor does
    add_eos: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)  # "default", "tool_use", ...


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read the folder's configs; raises CheckpointError naming the file at fault."""
    config = read_object_if_any(folder / "tokenizer_config.json")
    names = read_object_if_any(folder / "special_tokens_map.json")
    merged = names | {key: value for key, value in config.items() if value is not None}
    texts: dict[str, str] = {}
    for name in TOKEN_NAMES:
        if text := _token_text(merged.get(name)):
            texts[name] = text
    more = merged.get("additional_special_tokens") or merged.get("extra_special_tokens") or ()
    more_texts = [_token_text(token) for token in (more if isinstance(more, list) else ())]
    return SpecialTokens(
        texts=texts,
        more_texts=tuple(text for text in more_texts if text),
        eos_ids=_read_eos_ids(folder),
        add_bos=_flag(config.get("add_bos_token")),
        add_eos=_flag(config.get("add_eos_token")),
        chat_templates=_read_templates(folder, config.get("chat_template")),
    )


def _token_text(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _read_eos_ids(folder: Path) -> tuple[int, ...]:
    ids: dict[int, None] = {}  # a set that keeps its order
    for name in ("generation_config.json", "config.json"):
        config = read_object_if_any(folder / name)
        text_config = config.get("text_config")
        sources = [config, text_config] if isinstance(text_config, dict) else [config]
        for source in sources:
            value = source.get("eos_token_id")
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                    ids[item] = None
    return tuple(ids)


def _read_templates(folder: Path, value: object) -> dict[str, str]:
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict):
            name, source = entry.get("name"), entry.get("template")
            if isinstance(name, str) and isinstance(source, str):
                templates[name] = source
    more = folder / "additional_chat_templates"
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        templates[path.stem] = _read_template(path)
    # A template in a file of its own is the newer way, and wins.
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_template(path)
    return templates


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error

"""What a model folder says about its special tokens and chat templates, gathered in one record.

The facts are spread over tokenizer_config.json, special_tokens_map.json, generation_config.json,
config.json and template files, and older models lack half of them. This module only reads;
`tokenizer.py` turns names into ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import CheckpointError, shown
from quire.jsonfile import read_object_if_any

MAX_TEMPLATE_BYTES = 2_000_000
MAX_TOKEN_ID = 2**31
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
    path = folder / "tokenizer_config.json"
    config = read_object_if_any(path)
    names = read_object_if_any(folder / "special_tokens_map.json")
    merged = names | {key: value for key, value in config.items() if value is not None}
    texts: dict[str, str] = {}
    for name in TOKEN_NAMES:
        if text := _token_text(merged.get(name), name, folder):
            texts[name] = text
    return SpecialTokens(
        texts=texts,
        more_texts=_more_texts(merged, folder),
        eos_ids=_read_eos_ids(folder),
        add_bos=_flag(config.get("add_bos_token"), "add_bos_token", path),
        add_eos=_flag(config.get("add_eos_token"), "add_eos_token", path),
        chat_templates=_read_templates(folder, config.get("chat_template"), path),
    )


def _bad(where: Path, key: str, value: object, want: str) -> CheckpointError:
    return CheckpointError(f"{where}: got {key}={shown(value)}, want {want}")


def _token_text(token: object, key: str, folder: Path) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        want = "a token's text, or an object with its content"
        raise _bad(folder / "tokenizer_config.json", key, token, want)
    return text or None


def _more_texts(merged: Mapping[str, object], folder: Path) -> tuple[str, ...]:
    """The tokens without a role; newer files give each a name, which nothing here asks for."""
    keys = ("additional_special_tokens", "extra_special_tokens")
    key = next((key for key in keys if merged.get(key)), keys[0])
    listed = merged.get(key) or []
    if not isinstance(listed, (list, dict)):
        raise _bad(folder / "tokenizer_config.json", key, listed, "a list of tokens")
    found = [_token_text(token, key, folder) for token in listed if isinstance(listed, list)]
    return tuple(text for text in found if text)


def _flag(value: object, key: str, path: Path) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise _bad(path, key, value, "true or false")
    return value


def _read_eos_ids(folder: Path) -> tuple[int, ...]:
    ids: dict[int, None] = {}  # a set that keeps its order
    for name in ("generation_config.json", "config.json"):
        config = read_object_if_any(folder / name)
        text_config = config.get("text_config")
        sources = [config, text_config] if isinstance(text_config, dict) else [config]
        for source in sources:
            value = source.get("eos_token_id")
            listed = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(id) is int and 0 <= id < MAX_TOKEN_ID for id in listed):
                raise _bad(folder / name, "eos_token_id", value, "a token id, or a list of them")
            ids |= dict.fromkeys(listed)
    return tuple(ids)


def _read_templates(folder: Path, value: object, path: Path) -> dict[str, str]:
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value or []
    if not isinstance(entries, list) or not all(map(_is_named_template, entries)):
        want = "a text, or a list of objects with a name and a template"
        raise _bad(path, "chat_template", value, want)
    templates: dict[str, str] = {entry["name"]: entry["template"] for entry in entries}
    more = folder / "additional_chat_templates"
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        templates[path.stem] = _read_template(path)
    # A template in a file of its own is the newer way, and wins.
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_template(path)
    return templates


def _is_named_template(entry: object) -> bool:
    named = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else ()
    return bool(named) and all(isinstance(text, str) for text in named)


def _read_template(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(data) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error

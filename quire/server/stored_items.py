"""Items of a conversation as they are stored and listed: whole, with an id, in OpenAI's shape.

Clients send items in short forms; what is stored has one form, which `responses_input.py` reads
again as input. An id tells the response or conversation it was made for, so a reference to an item
finds it without another index.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.server.items import Item
from quire.server.responses_input import TEXT_KEYS

StoredItem = dict[str, Any]

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
_TOKEN = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}i?")


def response_id_of(item_id: str) -> str | None:
    """The response an item was made for, if it was one.

    >>> response_id_of("msg_" + 32 * "a" + "0001")[:8], response_id_of("other")
    ('resp_aaa', None)
    """
    found = _TOKEN.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def stored_items(
    given: str | Sequence[dict[str, Any]], token: str, param: str = "input"
) -> list[StoredItem]:
    """Items in their whole form; they were checked, or are checked when they are read as input."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [
        _stored(Item(item, f"{param}[{i}]"), f"{token}{i:04x}i") for i, item in enumerate(given)
    ]


def _stored(item: Item, mark: str) -> StoredItem:
    kind = item.get("type") or "message"
    own = item.get("id")
    prefix = PREFIXES.get(kind, "item") if isinstance(kind, str) else "item"
    base = {
        "id": own if isinstance(own, str) and own else f"{prefix}_{mark}",
        "type": kind,
        "status": "completed",
    }
    if kind == "message":
        return base | {"role": item.get("role"), "content": _parts(item)}
    keys = {
        "function_call": ("call_id", "name", "arguments"),
        "function_call_output": ("call_id", "output"),
    }.get(kind, ())
    if kind == "reasoning":
        return base | {"summary": [], "content": item.get("content") or []}
    return base | {key: item.get(key) for key in keys}


def _parts(item: Item) -> list[dict[str, Any]]:
    is_output = item.get("role") == "assistant"
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    made = []
    for part in content or []:
        kind = part.get("type") if isinstance(part, dict) else None
        key = TEXT_KEYS.get(kind, "text") if isinstance(kind, str) else "text"
        text = part.get(key) if isinstance(part, dict) else None
        if kind == "refusal":
            made.append({"type": "refusal", "refusal": text})
        elif is_output:
            made.append({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        else:
            made.append({"type": "input_text", "text": text})
    return made

"""Chat messages as clients send them, checked and brought to the one shape templates expect.

In: OpenAI-style dicts. Out: fresh dicts whose content is a string and whose tool-call arguments
are objects, which is what Hugging Face templates are written for. Only text: image and audio
parts are refused by name. Nothing here renders; see `template.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from quire.errors import BadRequest

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
Message: TypeAlias = Mapping[str, object]

MAX_MESSAGES = 16_384
MAX_ROLE_CHARS = 64
MAX_DEPTH = 48


def check_messages(messages: Sequence[Message]) -> list[dict[str, Json]]:
    """Validated copies of the messages; raises BadRequest naming the message at fault."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise BadRequest(
            f"got messages of type {type(messages).__name__}, want a list of dicts with "
            "'role' and 'content'",
            param="messages",
        )
    if not messages:
        raise BadRequest("got no messages, want at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(
            f"got {len(messages)} messages, want at most {MAX_MESSAGES}", param="messages"
        )
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_tools(tools: Sequence[Mapping[str, object]] | None) -> list[Json] | None:
    """Validated copies of tool definitions; an empty list means none."""
    if not tools:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise BadRequest(f"got tools of type {type(tools).__name__}, want a list", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRequest(
                f"got tools[{i}] of type {type(tool).__name__}, want a dict", param="tools"
            )
    return [plain_json(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def plain_json(value: object, where: str, depth: int = 0) -> Json:
    """A copy of JSON-like data; raises BadRequest on anything else, however deep."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{where} is nested deeper than {MAX_DEPTH}", param=_param(where))
    if isinstance(value, str):
        return _check_text(value, where)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        copy: dict[str, Json] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise BadRequest(f"got key {key!r} in {where}, want strings", param=_param(where))
            copy[key] = plain_json(item, f"{where}.{key}", depth + 1)
        return copy
    if isinstance(value, (list, tuple)):
        return [plain_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise BadRequest(
        f"got {where} of type {type(value).__name__}, want JSON data", param=_param(where)
    )


def _check_message(message: Message, where: str) -> dict[str, Json]:
    if not isinstance(message, Mapping):
        raise BadRequest(
            f"got {where} of type {type(message).__name__}, want a dict", param="messages"
        )
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= MAX_ROLE_CHARS:
        raise BadRequest(
            f"got {where}.role={role!r}, want a string of 1 to {MAX_ROLE_CHARS} characters",
            param="messages",
        )
    checked: dict[str, Json] = {}
    for key, value in message.items():
        if key == "content":
            checked[key] = _check_content(value, message, where)
        elif key == "tool_calls":
            checked[key] = _check_tool_calls(value, f"{where}.tool_calls")
        else:
            checked[key] = plain_json(value, f"{where}.{key}")
    if "content" not in checked:
        checked["content"] = _check_content(None, message, where)
    return checked


def _check_content(content: object, message: Message, where: str) -> str:
    if isinstance(content, str):
        return _check_text(content, f"{where}.content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, (list, tuple)):
        return "\n".join(
            _part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)
        )
    raise BadRequest(
        f"got {where}.content of type {type(content).__name__}, want a string or a list of "
        '{"type": "text", "text": ...} parts',
        param="messages",
    )


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return _check_text(part, where)
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return _check_text(text, f"{where}.text")
        raise BadRequest(
            f"got {where}.text of type {type(text).__name__}, want a string", param="messages"
        )
    raise BadRequest(
        f"got {where} with type={kind!r}, want 'text': only text is supported, not images, "
        "audio or files",
        param="messages",
    )


def _check_tool_calls(calls: object, where: str) -> Json:
    if calls is None:
        return None
    if not isinstance(calls, (list, tuple)):
        raise BadRequest(
            f"got {where} of type {type(calls).__name__}, want a list", param="messages"
        )
    return [_check_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _check_tool_call(call: object, where: str) -> Json:
    checked = plain_json(call, where)
    function = checked.get("function") if isinstance(checked, dict) else None
    if not isinstance(checked, dict) or not isinstance(function, dict):
        raise BadRequest(f"got {where} without a 'function' object", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Clients send a JSON string, templates print an object.
        function["arguments"] = _parse_arguments(arguments, f"{where}.function.arguments")
    return checked


def _parse_arguments(text: str, where: str) -> Json:
    if not text.strip():
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where} is not JSON: {error}", param="messages") from None
    return plain_json(arguments, where)


def _check_text(text: str, where: str) -> str:
    # A lone surrogate has no bytes, so no tokenizer can take it.
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"{where} is not valid text: {error.reason}", param=_param(where)
            ) from None
    return text


def _param(where: str) -> str:
    return where.split("[")[0].split(".")[0]

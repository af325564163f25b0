"""Conversations with tools, in the shape chat templates expect.

`template_messages` brings OpenAI's messages to it: text only, arguments as objects, nothing null
(templates ask `'tool_calls' in message`, so an empty field is not the same as none). For models
whose template ignores tools, `spell_out_tools` writes tools, calls and results into the text
itself, the way Hermes models do, and the `hermes` parser reads the answer. `template_inputs`
chooses between the two; the server and the offline API both come through it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quire.errors import BadRequest
from quire.text.messages import Json, plain_json
from quire.text.tools import hermes
from quire.text.tools.definitions import Tool
from quire.text.tools.formats import detect_tool_format

MAX_MESSAGES = 2_000
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def template_messages(messages: object) -> list[dict[str, Json]]:
    """Fresh messages for a template; raises BadRequest naming the part at fault."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise _wrong("messages", messages, "a list of messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise BadRequest(
            f"got {len(messages)} messages, want 1 to {MAX_MESSAGES}; shorten the conversation",
            param="messages",
        )
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


class TemplateInputs(NamedTuple):
    messages: list[dict[str, Json]]
    tools: list[dict[str, Json]] | None  # None: there are none, or the messages spell them out


def template_inputs(
    messages: object, tools: Sequence[Tool], chat_template: str | None
) -> TemplateInputs:
    """Messages and tools for this template; raises BadRequest naming the part at fault."""
    checked = template_messages(messages)
    has_calls = any(m.get("tool_calls") or m["role"] == "tool" for m in checked)
    if (tools or has_calls) and detect_tool_format(chat_template) is None:
        return TemplateInputs(spell_out_tools(checked, tools), None)
    return TemplateInputs(checked, [tool.definition() for tool in tools] or None)


def tools_as_system_text(tools: Sequence[Tool]) -> str:
    """Instructions for a model whose template does not print tools."""
    signatures = "\n".join(_dumps(tool.definition()) for tool in tools)
    example = f'{hermes.OPENER}\n{{"name": "...", "arguments": {{...}}}}\n{hermes.CLOSER}'
    return (
        f"You can call functions. These are their signatures:\n<tools>\n{signatures}\n</tools>\n\n"
        "To call a function, reply with its name and its arguments as JSON inside tags, one pair "
        f"of tags for each call:\n{example}\n\n"
        "The result comes back inside <tool_response> tags. If no function helps, reply in plain "
        "text."
    )


def spell_out_tools(
    messages: Sequence[Mapping[str, Json]], tools: Sequence[Tool]
) -> list[dict[str, Json]]:
    """`template_messages` rewritten for a template that only prints roles and content."""
    spelled: list[dict[str, Json]] = []
    if tools:
        spelled.append({"role": "system", "content": tools_as_system_text(tools)})
    previous: Json = None
    for i, message in enumerate(messages):
        role, content = message["role"], str(message["content"])
        if role == "system" and tools and i == 0:
            spelled[0]["content"] = f"{content}\n\n{spelled[0]['content']}"
        elif role == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if previous == "tool":  # one turn for all results: roles have to alternate
                spelled[-1]["content"] = f"{spelled[-1]['content']}\n{response}"
            else:
                spelled.append({"role": "user", "content": response})
        else:
            calls = message.get("tool_calls")
            pieces = [content, *_call_texts(calls if isinstance(calls, list) else [])]
            text = "\n".join(piece for piece in pieces if piece)
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            spelled.append({**kept, "content": text})
        previous = role
    return spelled


def _call_texts(calls: Iterable[Json]) -> Iterable[str]:
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            fields: Json = {"name": function.get("name"), "arguments": function.get("arguments")}
            yield f"{hermes.OPENER}\n{_dumps(fields)}\n{hermes.CLOSER}"


def _message(message: object, where: str) -> dict[str, Json]:
    if not isinstance(message, Mapping):
        raise _wrong(where, message, "an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    shaped: dict[str, Json] = {"role": ROLES[role]}
    shaped["content"] = _content(message.get("content"), role, f"{where}.content")
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            shaped[key] = _text(message[key], f"{where}.{key}")
    if role == "assistant":
        for key in ("reasoning", "reasoning_content"):  # templates know the second name
            if message.get(key) is not None:
                shaped["reasoning_content"] = _text(message[key], f"{where}.{key}")
        if message.get("tool_calls"):
            shaped["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return shaped


def _content(content: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""  # what it said were its calls
    if isinstance(content, (list, tuple)):
        return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))
    return _text(content, where, 'a string or a list of {"type": "text", "text": ...}')


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(where, part, '{"type": "text", "text": ...}')
    kind = part.get("type")
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    links = [name for name in part if isinstance(name, str) and name.endswith("url")]
    if key is None or links:
        shown = f"a part with {links[0]!r}" if links else f"type={kind!r}"
        raise BadRequest(
            f"got {where} with {shown}, want type='text': only text is read here, no images, "
            "audio, video, files or links; send what matters as text",
            param=where,
        )
    return _text(part.get(key), f"{where}.{key}")


def _tool_calls(calls: object, where: str) -> list[Json]:
    if not isinstance(calls, (list, tuple)):
        raise _wrong(where, calls, "a list of calls")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(where, call, '{"id": ..., "function": {"name": ..., "arguments": ...}}')
    inner = f"{where}.function"
    shaped: dict[str, Json] = {}
    if call.get("id") is not None:
        shaped["id"] = _text(call["id"], f"{where}.id")
    name = _text(function.get("name"), f"{inner}.name")
    arguments = _arguments(function.get("arguments"), f"{inner}.arguments")
    return {**shaped, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: object, where: str) -> Json:
    """An object if it can be one: templates print it as JSON, clients send its text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return _text(arguments, where)
        return plain_json(parsed if isinstance(parsed, dict) else arguments, where)
    if not isinstance(arguments, Mapping):
        raise _wrong(where, arguments, "the JSON text of an object")
    return plain_json(arguments, where)


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _text(value: object, where: str, want: str = "a string") -> str:
    if not isinstance(value, str):
        raise _wrong(where, value, want)
    plain_json(value, where)  # refuses what no tokenizer can take
    return value


def _wrong(where: str, value: object, want: str) -> BadRequest:
    shown = f"={value[:80]!r}" if isinstance(value, str) else f" of type {type(value).__name__}"
    return BadRequest(f"got {where}{shown}, want {want}", param=where)


def _dumps(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)

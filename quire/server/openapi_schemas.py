"""Schemas that the structs do not spell out: the insides of messages, bounds, and error bodies.

Structs take a conversation as plain objects and leave ranges to `SamplingParams`; here is what
those objects and ranges are, so that a reader, or a machine that makes up requests, gets them
right. A schema here may allow more than the server does, never less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.params import MAX_BIASED_TOKENS
from quire.server.ollama_input import LEVELS
from quire.server.ollama_models import TAG
from quire.server.settings import Limits

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}


def _object(required: Sequence[str], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _kinds(*kinds: str, **properties: Schema) -> Schema:
    """An object of one of these types, with all of these properties."""
    return _object(["type", *properties], type={"enum": list(kinds)}, **properties)


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _content(*parts: Schema) -> Schema:
    return _either(TEXT, {"type": "array", "items": _either(*parts)})


FUNCTION = _object(["name"], name=TEXT, description=OPTIONAL_TEXT)
REFUSAL = _kinds("refusal", refusal=TEXT)
TEXT_PARTS = (_kinds("text", "input_text", "output_text", text=TEXT), REFUSAL)
REASONING = _kinds("reasoning_text", text=TEXT)
TEXT_BLOCK = _kinds("text", text=TEXT)
RESULT = _kinds("tool_result", tool_use_id=TEXT)
BLOCKS = (
    TEXT_BLOCK,
    _kinds("thinking", thinking=TEXT),
    _kinds("redacted_thinking"),
    _kinds("tool_use", id=TEXT, name=TEXT, input={"type": "object"}),
)
INSIDES: dict[str, Schema] = {
    "Error": _object(
        ["error"],
        error=_object(
            ["message", "type", "param", "code"],
            message=TEXT,
            type=TEXT,
            param=OPTIONAL_TEXT,
            code=OPTIONAL_TEXT,
        ),
    ),
    "AnthropicError": _object(
        ["type", "error"],
        type={"const": "error"},
        error=_object(["type", "message"], type=TEXT, message=TEXT),
    ),
    "OllamaError": _object(["error"], error=TEXT),
    "ChatMessage": _either(
        _object(
            ["role", "content"],
            role={"enum": ["system", "developer", "user", "tool", "function"]},
            content=_content(*TEXT_PARTS),
            tool_call_id=OPTIONAL_TEXT,
        ),
        _object(
            ["role"],
            role={"const": "assistant"},
            content=_either(_content(*TEXT_PARTS), {"type": "null"}),
        ),
    ),
    "ChatTool": _kinds("function", function=FUNCTION),
    "InputItem": _either(
        _object(
            ["role", "content"],
            type={"enum": ["message", None]},
            role={"enum": ["user", "assistant", "system", "developer"]},
            content=_content(*TEXT_PARTS, REASONING),
        ),
        _kinds("function_call", call_id=TEXT, name=TEXT, arguments=TEXT),
        _kinds("function_call_output", call_id=TEXT, output=_content(*TEXT_PARTS, REASONING)),
        _kinds("reasoning"),
        _kinds("item_reference", id=TEXT),
    ),
    "ResponseTool": _kinds("function", name=TEXT),
    "MessageTurn": _either(
        _object(["role", "content"], role={"const": "user"}, content=_content(TEXT_BLOCK, RESULT)),
        _object(["role", "content"], role={"const": "assistant"}, content=_content(*BLOCKS)),
        _object(["role", "content"], role={"const": "system"}, content=_content(TEXT_BLOCK)),
    ),
    "MessageTool": _object(["name"], name=TEXT, description=OPTIONAL_TEXT),
    "OllamaMessage": _object(
        ["role"],
        role={"enum": ["system", "user", "assistant", "tool"]},
        content=OPTIONAL_TEXT,
        thinking=OPTIONAL_TEXT,
    ),
    "OllamaTool": _object(["function"], type={"const": "function"}, function=FUNCTION),
}
# Struct, field -> what the objects in that list are.
LISTS = {
    ("ChatFields", "messages"): "ChatMessage",
    ("ChatFields", "tools"): "ChatTool",
    ("ClassifyFields", "messages"): "ChatMessage",
    ("PoolingFields", "messages"): "ChatMessage",
    ("TokenizeFields", "messages"): "ChatMessage",
    ("TokenizeFields", "tools"): "ChatTool",
    ("ResponsesFields", "input"): "InputItem",
    ("ResponsesFields", "tools"): "ResponseTool",
    ("ConversationFields", "items"): "InputItem",
    ("MessagesFields", "messages"): "MessageTurn",
    ("MessagesFields", "tools"): "MessageTool",
    ("CountTokensFields", "messages"): "MessageTurn",
    ("CountTokensFields", "tools"): "MessageTool",
    ("OllamaChatFields", "messages"): "OllamaMessage",
    ("OllamaChatFields", "tools"): "OllamaTool",
}


def narrow(schemas: dict[str, Schema], limits: Limits, models: Sequence[str]) -> None:
    """Write into the structs' schemas what is known of their fields."""
    bounds = _bounds(limits)
    if models:
        bounds["model"] = Bound("string", {"enum": list(models)})
    own = bounds | _ollama_bounds(limits, models)
    for struct, schema in schemas.items():
        for name, found in schema.get("properties", {}).items():
            bound = (own if struct.startswith("Ollama") else bounds).get(name)
            if bound is not None:
                _write(found, *bound)
            if (struct, name) in LISTS:
                _write(found, "array", {"items": _reference(LISTS[struct, name])})


def _write(schema: Schema, type: str, keywords: Schema) -> None:
    """Into the alternative that has the type; a field may have none of it."""
    for one in schema.get("anyOf", [schema]):
        if one.get("type") == type:
            one.update(keywords)


class Bound(NamedTuple):
    type: str
    keywords: Schema


def _bounds(limits: Limits) -> dict[str, Bound]:
    """By field name, the same in every struct; `SamplingParams` and the limits say the numbers."""
    count = {"minimum": 1, "maximum": 2**63 - 1}
    logprobs = {"minimum": 0, "maximum": limits.max_logprobs}
    penalty = {"minimum": -2, "maximum": 2}
    stops: Schema = {
        "maxItems": limits.max_stops,
        "items": {"type": "string", "minLength": 1, "maxLength": limits.max_stop_chars},
    }
    return {
        "temperature": Bound("number", {"minimum": 0, "maximum": 100}),
        "top_p": Bound("number", {"exclusiveMinimum": 0, "maximum": 1}),
        "min_p": Bound("number", {"minimum": 0, "maximum": 1}),
        "top_k": Bound("integer", {"minimum": -1, "maximum": 2**31 - 1}),
        "n": Bound("integer", {"minimum": 1, "maximum": limits.max_n}),
        "seed": Bound("integer", {"minimum": -(2**63), "maximum": 2**63 - 1}),
        "max_tokens": Bound("integer", count),
        "max_completion_tokens": Bound("integer", count),
        "max_output_tokens": Bound("integer", count),
        "min_tokens": Bound("integer", {"minimum": 0, "maximum": 2**63 - 1}),
        "logprobs": Bound("integer", logprobs),
        "top_logprobs": Bound("integer", logprobs),
        "prompt_logprobs": Bound("integer", logprobs),
        "presence_penalty": Bound("number", penalty),
        "frequency_penalty": Bound("number", penalty),
        "repetition_penalty": Bound("number", {"exclusiveMinimum": 0, "maximum": 10}),
        "repeat_penalty": Bound("number", {"exclusiveMinimum": 0, "maximum": 10}),
        "timeout": Bound("number", {"exclusiveMinimum": 0}),
        "priority": Bound("integer", {"minimum": 1 - 2**31, "maximum": 2**31 - 1}),
        "dimensions": Bound("integer", count),
        "top_n": Bound("integer", {"minimum": 0, "maximum": 2**63 - 1}),
        "truncate_prompt_tokens": Bound("integer", {"minimum": -1, "maximum": 2**63 - 1}),
        "cache_salt": Bound("string", {"maxLength": 256}),
        "thinking": Bound("object", _object(["type"], type=TEXT)),
        "messages": Bound("array", {"minItems": 1, "maxItems": limits.max_messages}),
        "logit_bias": Bound("object", {"maxProperties": MAX_BIASED_TOKENS}),
        "stop": Bound("array", stops),
        "stop_sequences": Bound("array", stops),
        "bad_words": Bound("array", {"maxItems": limits.max_bad_words}),
        "stop_token_ids": Bound("array", {"maxItems": limits.max_bad_words}),
    }


def _ollama_bounds(limits: Limits, models: Sequence[str]) -> dict[str, Bound]:
    """Where Ollama's fields take more than others of their name: tags, and empty requests."""
    bounds = {
        "messages": Bound("array", {"maxItems": limits.max_messages}),
        "format": Bound("string", {"enum": ["", "json"]}),
        "think": Bound("string", {"enum": list(LEVELS)}),
    }
    if models:
        names = Bound("string", {"enum": [*models, *(model + TAG for model in models)]})
        bounds |= {"model": names, "name": names}
    return bounds

"""Working requests of every kind, and one or a few places in them, at any depth, made wrong.

Deterministic: the same number gives the same mutation, so that a failure can be seen again."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, NamedTuple

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at it.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "enum": ["sea", "sky"]}},
            "required": ["at"],
        },
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "a"}'},
}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
]
SCHEMA = {"name": "a", "schema": {"type": "object", "properties": {"b": {"type": "integer"}}}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stop_token_ids": [4],
    "bad_words": ["no"],
    "priority": 1,
    "timeout": 5.0,
    "cache_salt": "s",
}
BASES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": TURNS,
            "max_tokens": 4,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "n": 2,
            **SAMPLING,
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TURNS[:2],
            "max_completion_tokens": 4,
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["a", "b"],
            "max_tokens": 3,
            "echo": True,
            "logprobs": 1,
            "structured_outputs": {"choice": ["yes", "no"]},
            "stream_options": None,
            **SAMPLING,
        },
    ),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 3, "stream": True, "n": 2}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "blue"},
            ],
            "instructions": "Be brief.",
            "max_output_tokens": 4,
            "tools": [{"type": "function", **TOOL["function"]}],  # type: ignore[dict-item]
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            },
            "text": {"format": {"type": "json_schema", **SCHEMA}},
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "blue"}],
                },
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "look"},
            "thinking": {"type": "disabled"},
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    (
        "/v1/embeddings",
        {"input": ["a", "b"], "dimensions": 2, "encoding_format": "base64", "pooling": "last"},
    ),
    ("/score", {"text_1": ["a"], "text_2": ["b", "c"], "truncate_prompt_tokens": 9}),
    ("/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/pooling", {"input": "a", "task": "embed", "normalize": True}),
    ("/classify", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/generate", {"prompt": "a", "max_tokens": 3, "temperature": 0.5, "stop": ["x"]}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/admin/abort", {"request_id": "none"}),
    (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]},
                {"role": "tool", "tool_name": "look", "content": "blue"},
            ],
            "tools": [TOOL],
            "format": SCHEMA["schema"],
            "options": {"temperature": 0.5, "num_predict": 4, "stop": ["x"]},
            "think": False,
        },
    ),
    ("/api/generate", {"prompt": "a", "system": "s", "context": [5], "stream": False}),
    ("/api/embed", {"input": ["a", "b"], "truncate": True}),
]
ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 0.5, -0.5, 1e308),
    *("", " ", "\x00", "\ud800", "é" * 50, "7", "tiny", "auto", "none", "text", "x" * 2_000),
    *({"self": 1}, {"tokenize": True}, {"format": {}, "type": 3}, {"name": ["a"]}, {"$ref": "#"}),
    *([], [[]], [None], {}, {"": None}, {"type": None}, {"type": []}, {"a": {"b": [1]}}, ["x"] * 3),
]
ODD_KEYS = [
    *("type", "role", "content", "name", "function", "text", "tools", "tool_choice", "model", "n"),
    *("stream", "messages", "prompt", "input", "schema", "json", "strict", "self", "", "\x00", "é"),
]


class Mutated(NamedTuple):
    path: str
    body: bytes


def mutated(number: int) -> Mutated:
    """The mutation of that number; every kind of request has its turn."""
    rng = random.Random(number)
    path, base = BASES[number % len(BASES)]
    body: Any = copy.deepcopy(base)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        body = _changed(body, rng)
    return Mutated(path, json.dumps(body).encode())


def _changed(value: Any, rng: random.Random) -> Any:
    """With one place in it changed, the deeper ones as likely as those on top."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        if what < 0.2:
            return {**value, rng.choice(ODD_KEYS): _odd(rng)}
        return {**value, key: _changed(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index, what = rng.randrange(len(value)), rng.random()
        if what < 0.1:
            return value[:index] + value[index + 1 :]
        if what < 0.2:
            return [*value, _odd(rng)]
        return [*value[:index], _changed(value[index], rng), *value[index + 1 :]]
    what = rng.random()
    if what < 0.1:
        return [value]
    if what < 0.2:
        return {rng.choice(ODD_KEYS): value}
    return _odd(rng)


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD_VALUES))

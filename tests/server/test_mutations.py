"""Working requests with any part of them replaced: an answer or a refusal, never a bug.

Finds what single fields of random JSON do not: a wrong type deep inside a body that is right
otherwise, and keys where our own names are.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest

from tests.server.asgi import call
from tests.server.fakes import Bench

Place: TypeAlias = tuple[Any, Any]  # a dict or list, and a key or index of it

SCHEMA = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "format": "date", "pattern": "a"},
        "n": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/x"}]},
    },
    "$defs": {"x": {"const": {"format": "y"}}},
}
FUNCTION = {"name": "look", "description": "d", "strict": True, "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
    {"role": "user", "content": "go"},
]
SAMPLING = {
    "max_tokens": 6,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stop_token_ids": [9],
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            **SAMPLING,
            "messages": TALK,
            "tools": [TOOL],
            "tool_choice": "auto",
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False, "a": [1, {"b": 2}]},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "max_tokens": 6,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "chat_template": "{{ messages[0].content }}",
            "stream": True,
        },
    ),
    (
        "/v1/completions",
        {**SAMPLING, "prompt": ["a", "b"], "echo": True, "logprobs": 1, "prompt_logprobs": 1},
    ),
    (
        "/v1/completions",
        {"prompt": [[5, 6], [7]], "structured_outputs": {"json": SCHEMA, "regex": None}},
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "y"},
            ],
            "max_output_tokens": 6,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}],
            },
            "text": {"format": {"type": "json_schema", "schema": SCHEMA}, "verbosity": "low"},
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "i", "name": "look", "input": {"at": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "i", "content": "r"}],
                },
            ],
            "max_tokens": 6,
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "look"},
            "thinking": {"type": "enabled", "budget_tokens": 10},
            "output_config": {"effort": "low", "format": None},
            "stream": True,
        },
    ),
    (
        "/tokenize",
        {"messages": TALK, "tools": [TOOL], "add_generation_prompt": True, "prompt": None},
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 2**31, 2**64, 10**30, 1.5, 1e308, "", "a", "auto", "required"),
    *("function", "text", "json_object", "\ud800", "\x00", "x" * 300, [], {}, [[]], [{}], [None]),
    *({"": 1}, ["a", 1], {"type": "object"}, {"name": ["a"]}, {"$ref": "#"}, {"type": ["a", 1]}),
    *({"self": 1}, {"tokenize": True}, {"format": {}, "type": 3}),
]
KEY_WORDS = """
self tokenize type name format const enum properties allOf messages tools role content tool_calls
function schema json chat_template $defs input x-guidance id documents
"""
KEYS = KEY_WORDS.split()
ANSWERS = ['[{"name": "look", "parameters": {}}]', "<think>a</think>b", '<tool_call>{"name": "f"']


def places(value: Any) -> Iterator[Place]:
    """Everything inside, as where it is."""
    inner: list[Any] = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, item in inner:
        yield value, key
        if isinstance(item, (dict, list)):
            yield from places(item)


def mutated(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = list(places(body))
        if not found:
            break
        holder, key = rng.choice(found)
        item = holder[key]
        kind = rng.random()
        if kind < 0.1:
            del holder[key]
            continue
        if kind < 0.3 and isinstance(item, dict):
            made = {**item, rng.choice(KEYS): rng.choice(VALUES)}
        elif kind < 0.4:
            other, place = rng.choice(found)
            made = copy.deepcopy(other[place])
        else:
            made = copy.deepcopy(rng.choice(VALUES))
        holder[key] = made
    return body


@pytest.mark.parametrize("path", sorted({path for path, _ in BODIES}))
def test_no_mutation_of_a_working_body_is_a_bug(path: str) -> None:
    """Red when some wrong type, anywhere in a body, is a 5xx or leaves a generation open."""
    rng = random.Random(path)
    seeds = [body for seed_path, body in BODIES if seed_path == path]

    async def work() -> None:
        bench = Bench(trust_request_chat_template=True)
        for body in seeds:
            assert (await call(bench.app, "POST", path, body)).status == 200, body
        for _ in range(400):
            body = mutated(rng.choice(seeds), rng)
            bench.link.answer = rng.choice(ANSWERS)
            reply = await call(bench.app, "POST", path, json.dumps(body).encode())
            assert reply.status in (200, 400, 404), (body, reply.body)
            assert b"internal error" not in reply.body, body
            assert bench.link.num_open == 0 and bench.server.admission.num_open == 0
            bench.link.submitted.clear()

    asyncio.run(work())

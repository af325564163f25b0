"""Tokens that are there together go out together: a reader that is behind costs few writes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.asgi import Call, call
from tests.server.fakes import Bench

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
ANSWER = "Once upon a time there was a quire of pages, and all of them were written on."


def streamed(path: str, body: dict[str, Any], burst: int) -> Call:
    async def work() -> Call:
        bench = Bench()
        bench.link.answer, bench.link.burst = ANSWER, burst
        return await call(bench.app, "POST", path, body | {"stream": True, "max_tokens": 500})

    return asyncio.run(work())


def text_of(made: Call) -> str:
    events = [line[6:] for line in made.body.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


@pytest.mark.parametrize(
    "path, body", [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", CHAT)]
)
def test_many_tokens_in_one_write(path: str, body: dict[str, Any]) -> None:
    """Red when every token is a write of its own however many are there, or one is lost."""
    slow, fast = streamed(path, body, burst=1), streamed(path, body, burst=1_000)
    assert text_of(slow) == text_of(fast) == ANSWER
    assert fast.num_writes <= 5 < slow.num_writes


def test_prepared_chunks_equal_those_made_one_by_one() -> None:
    """Red when the template of a completion's chunk lacks a field that others have."""
    plain = streamed("/v1/completions", {"prompt": "Hi"}, burst=1)
    usage = {"stream_options": {"include_usage": True}}
    counted = streamed("/v1/completions", {"prompt": "Hi"} | usage, burst=1)
    made = streamed("/v1/completions", {"prompt": "Hi", "logprobs": 0}, burst=1)

    def shapes(one: Call) -> list[set[str]]:
        lines = [line[6:] for line in one.body.split(b"\n\n") if line.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
        return [set(event) | set(event["choices"][0]) for event in events if event["choices"]]

    assert shapes(plain)[0] == shapes(made)[0]
    assert shapes(counted)[0] == shapes(plain)[0] | {"usage"}

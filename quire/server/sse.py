"""Server-sent events, made cheaply: what does not change within a request is encoded once.

A chunk of streamed text is `prefix + JSON string + suffix`; only the text is encoded per token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.problems import Problem

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HOLE = "\u241f"  # stands for the text in a prepared chunk


def data(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def named(event: str, value: Any) -> bytes:
    """An event with a name, as the Responses and Messages APIs send them."""
    return b"event: " + event.encode() + b"\ndata: " + encode(value) + b"\n\n"


def failure(problem: Problem) -> bytes:
    return b"data: " + problem.body() + b"\n\n"


def named_failure(problem: Problem) -> bytes:
    return b"event: error\ndata: " + problem.body("anthropic") + b"\n\n"


class TextChunk:
    """The chunks of one choice whose only news is text.

    >>> TextChunk({"choices": [{"delta": {"content": "@"}}]}, "@")("hi")
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\\n\\n'
    """

    def __init__(self, shape: Any, hole: str = HOLE) -> None:
        """`shape` is one chunk with the string `hole` where the text goes."""
        before, found, after = encode(shape).partition(encode(hole))
        assert found, "the hole is not in the shape"
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def __call__(self, text: str) -> bytes:
        return self._before + encode(text) + self._after

"""Reasoning, content and calls of one output, in the order they were written."""

from __future__ import annotations

import pytest

from quire.text.reasoning import ReasoningSplitter
from quire.text.tools.formats import tool_parser
from quire.text.tools.parser import CallArguments, CallStart, TextPart
from quire.text.tools.router import OutputRouter, ReasoningPart
from tests.text.tool_reading import chunkings

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
OUTPUT = f"<think>\nperhaps {CALL}?\n</think>\n\nLooking.\n{CALL}"


def route(router: OutputRouter, pieces: list[str]) -> list[tuple[str, str]]:
    """(kind, text) with neighbours of a kind joined."""
    joined: list[tuple[str, str]] = []
    for part in [part for piece in pieces for part in router.push(piece)] + router.finish():
        if isinstance(part, CallStart):
            kind, text = "call", part.name
        elif isinstance(part, CallArguments):
            kind, text = "arguments", part.delta
        else:
            assert isinstance(part, (TextPart, ReasoningPart))
            kind, text = type(part).__name__, part.text
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + text)
        else:
            joined.append((kind, text))
    return joined


def splitter() -> ReasoningSplitter:
    return ReasoningSplitter("<think>", "</think>", inside=False)


@pytest.mark.parametrize(
    ("reasons", "calls", "want"),
    [
        (
            True,
            True,
            [
                ("ReasoningPart", f"perhaps {CALL}?"),
                ("TextPart", "Looking.\n"),
                ("call", "f"),
                ("arguments", '{"a": 1}'),
            ],
        ),
        (
            True,
            False,
            [("ReasoningPart", f"perhaps {CALL}?"), ("TextPart", f"Looking.\n{CALL}")],
        ),
        (
            False,
            True,
            [
                ("TextPart", "<think>\nperhaps "),
                ("call", "f"),
                ("arguments", '{"a": 1}'),
                ("TextPart", "?\n</think>\n\nLooking.\n"),
                ("call", "f"),
                ("arguments", '{"a": 1}'),
            ],
        ),
        (False, False, [("TextPart", OUTPUT)]),
    ],
)
def test_each_half_may_be_missing(reasons: bool, calls: bool, want: list[tuple[str, str]]) -> None:
    for pieces in chunkings(OUTPUT):
        router = OutputRouter(
            splitter() if reasons else None, tool_parser("hermes") if calls else None
        )
        assert route(router, pieces) == want


def test_what_is_held_back_comes_at_the_end() -> None:
    router = OutputRouter(splitter(), tool_parser("hermes"))
    assert router.push("<thi") == []
    assert route(router, ["s <tool"]) == [("TextPart", "<this <tool")]

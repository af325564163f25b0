"""The schema of forced calls lets exactly the chosen calls through, and its parser reads them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from quire.text.tools.definitions import Tool, ToolChoice
from quire.text.tools.forced import ForcedCallParser, forced_schema
from tests.text.tool_reading import cut, read

WEATHER = Tool(
    "weather",
    "Look outside.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock", None, {"type": "object", "properties": {}})
TREE = Tool(
    "tree",
    None,
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/node"}},
        "required": ["root"],
        "additionalProperties": False,
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "required": ["kids"],
                "additionalProperties": False,
            }
        },
    },
)
LIST = Tool(  # the same name in $defs as in TREE, but another meaning; and a reference to the root
    "list",
    None,
    {
        "type": "object",
        "properties": {"node": {"$ref": "#/$defs/node"}, "rest": {"$ref": "#"}},
        "required": ["node"],
        "additionalProperties": False,
        "$defs": {"node": {"enum": ["a", "b"]}},
    },
)
TOOLS = [WEATHER, CLOCK, TREE, LIST]
REQUIRED = ToolChoice("required")


@cache
def tokenizer() -> Any:
    """One token per byte."""
    llguidance = pytest.importorskip("llguidance")
    return llguidance.LLTokenizer("byte")


def accepts(schema: dict[str, Any], output: str) -> bool:
    llguidance = pytest.importorskip("llguidance")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(tokenizer(), grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(output.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize(
    ("calls", "is_accepted"),
    [
        ([call("weather", city="Paris")], True),
        ([call("weather", city="Paris", days=2), call("clock")], True),
        ([call("tree", root={"kids": [{"kids": []}]})], True),
        ([call("list", node="a", rest={"node": "b"})], True),
        ([], False),
        ([call("weather")], False),
        ([call("weather", city=3)], False),
        ([call("clock", city="Paris")], False),
        ([call("sing")], False),
        ([call("tree", root="a")], False),
        ([call("list", node={"kids": []})], False),
        ([{"name": "clock"}], False),
        ([{**call("clock"), "more": 1}], False),
        (call("clock"), False),
    ],
)
def test_schema_lets_calls_through_and_nothing_else(calls: Any, is_accepted: bool) -> None:
    schema = forced_schema(TOOLS, REQUIRED, parallel=True)
    assert accepts(schema, json.dumps(calls)) is is_accepted


def test_one_call_only() -> None:
    two = json.dumps([call("clock"), call("clock")])
    one = json.dumps([call("clock")])
    for choice, parallel in [(REQUIRED, False), (ToolChoice("required", "clock"), True)]:
        schema = forced_schema(TOOLS, choice, parallel)
        assert accepts(schema, one) and not accepts(schema, two)


def test_a_named_function_is_the_only_one() -> None:
    schema = forced_schema(TOOLS, ToolChoice("required", "clock"), parallel=True)
    assert not accepts(schema, json.dumps([call("weather", city="Paris")]))
    assert "weather" not in json.dumps(schema)


def test_the_tools_own_schema_is_left_alone() -> None:
    before = json.dumps(LIST.parameters)
    forced_schema(TOOLS, REQUIRED, parallel=True)
    assert json.dumps(LIST.parameters) == before


def test_parser_reads_what_the_schema_allows() -> None:
    calls = [call("weather", city="Zürich"), call("clock"), call("tree", root={"kids": []})]
    for indent in (None, 2):
        output = json.dumps(calls, indent=indent, ensure_ascii=False)
        for size in range(1, 12):
            reading = read(ForcedCallParser(), cut(output, size))
            want = [(c["name"], c["parameters"]) for c in calls]
            assert reading.plain() == ("", want)


def test_without_a_grammar_the_rest_is_text() -> None:
    reading = read(ForcedCallParser(), ['[{"name": "clock", "parameters": {}}, sorry'])
    assert reading.plain() == (", sorry", [("clock", {})])


def test_a_call_torn_at_the_end_is_no_text() -> None:
    """Red when half a call, cut by max_tokens, comes out as what the model said."""
    output = json.dumps([call("weather", city="Paris"), call("tree", root={"kids": []})])
    for end in range(len(output)):
        for size in (1, 7, 999):
            reading = read(ForcedCallParser(), cut(output[:end], size))
            assert reading.text == ""
            whole = [c for c in reading.calls if c.closing is None]
            assert [c.name for c in whole] == ["weather", "tree"][: len(whole)]
    assert len(whole) == 2

"""tools and tool_choice: what is let through, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import BadRequest
from quire.text.tools.definitions import Tool, ToolChoice, check_tool_choice, check_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **fields}}


def test_tools_become_values() -> None:
    (tool,) = check_tools([function(description="Look.", parameters=SCHEMA, strict=True)])
    assert tool == Tool("weather", "Look.", SCHEMA, is_strict=True)
    assert tool.parameters is not SCHEMA  # the caller's own is left alone
    assert tool.definition() == function(description="Look.", parameters=SCHEMA)


def test_nulls_and_unknown_fields_are_nothing() -> None:
    tool = function(description=None, parameters=None, strict=None, color="red") | {"x": 1}
    assert check_tools([tool]) == [Tool("weather", None, {"type": "object", "properties": {}})]
    assert check_tools(None) == check_tools([]) == []
    assert "description" not in str(check_tools([tool])[0].definition())


@pytest.mark.parametrize(
    ("tools", "param", "reason"),
    [
        ("weather", "tools", "want a list"),
        ({"a": 1}, "tools", "of type dict, want a list"),
        ([function()] * 129, "tools", "got 129 tools, want at most 128"),
        (["f"], "tools[0]", "want {"),
        ([{"function": {"name": "f"}}], "tools[0].type", "type=None, want 'function'"),
        ([{"type": "web_search"}], "tools[0].type", "'web_search', want 'function'"),
        ([{"type": "function"}], "tools[0].function", "function=None, want"),
        ([{"type": "function", "function": []}], "tools[0].function", "of type list"),
        ([function(name=None)], "tools[0].function.name", "name=None, want 1 to 64"),
        ([function(name="")], "tools[0].function.name", "name='', want 1 to 64"),
        ([function(name="a b")], "tools[0].function.name", "'a b', want 1 to 64 letters"),
        ([function(name="x" * 65)], "tools[0].function.name", "want 1 to 64"),
        ([function(name="größe")], "tools[0].function.name", "want 1 to 64"),
        ([function(), function()], "tools[1].function.name", "both named 'weather'; rename"),
        ([function(description=3)], "tools[0].function.description", "=3, want a string"),
        ([function(strict="yes")], "tools[0].function.strict", "='yes', want true or false"),
        ([function(parameters=[])], "tools[0].function.parameters", "want a JSON schema"),
        (
            [function(parameters={"type": "string"})],
            "tools[0].function.parameters.type",
            "'string', want 'object'",
        ),
        (
            [function(parameters={"properties": []})],
            "tools[0].function.parameters.properties",
            "want an object of schemas",
        ),
        ([function(parameters={"x": {1}})], "tools", "want JSON data"),
        ([function(description="\ud800")], "tools", "not valid text"),
    ],
)
def test_bad_tools_are_refused_by_name(tools: Any, param: str, reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_tools(tools)
    assert reason in str(caught.value)
    assert caught.value.param == param


TOOLS = [Tool("weather", None, {}), Tool("clock", None, {})]
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("choice", "tools", "want"),
    [
        (None, TOOLS, ToolChoice("auto")),
        (None, [], ToolChoice("none")),
        ("auto", TOOLS, ToolChoice("auto")),
        ("auto", [], ToolChoice("none")),
        ("none", TOOLS, ToolChoice("none")),
        ("none", [], ToolChoice("none")),
        ("required", TOOLS, ToolChoice("required")),
        (NAMED, TOOLS, ToolChoice("required", "clock")),
    ],
)
def test_choices(choice: Any, tools: list[Tool], want: ToolChoice) -> None:
    assert check_tool_choice(choice, tools) == want
    assert want.is_forced == (choice in ("required", NAMED))


@pytest.mark.parametrize(
    ("choice", "tools", "param", "reason"),
    [
        ("required", [], "tool_choice", "without tools; send the tools"),
        (NAMED, [], "tool_choice", "without tools"),
        ("any", TOOLS, "tool_choice", "'any', want \"auto\""),
        (7, TOOLS, "tool_choice", "want"),
        ({"type": "allowed_tools"}, TOOLS, "tool_choice", "want"),
        ({"type": "function"}, TOOLS, "tool_choice.function.name", "name=None, want"),
        (
            {"type": "function", "function": {"name": "sing"}},
            TOOLS,
            "tool_choice.function.name",
            "'sing', which is not among the tools: 'weather', 'clock'",
        ),
    ],
)
def test_bad_choices_are_refused_by_name(
    choice: Any, tools: list[Tool], param: str, reason: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        check_tool_choice(choice, tools)
    assert reason in str(caught.value)
    assert caught.value.param == param

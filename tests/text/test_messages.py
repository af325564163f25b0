"""What a client may put into messages, and how it reaches the template."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import BadRequest
from quire.text.messages import check_messages, check_tools, plain_json


def one(**fields: Any) -> dict[str, Any]:
    return check_messages([{"role": "user", **fields}])[0]


def test_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one(content=parts)["content"] == "a\nb"


def test_tool_call_arguments_become_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    message = one(content=None, tool_calls=[call])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": [1]}
    assert call["function"]["arguments"] == '{"x": [1]}'  # the caller's own is left alone


def test_other_fields_are_kept() -> None:
    assert one(content="x", name="n", reasoning_content="r")["reasoning_content"] == "r"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ("hi", "want a list"),
        ({"role": "user", "content": "x"}, "want a list"),
        (["hi"], r"messages\[0\] of type str"),
        ([{"content": "x"}], "role=None"),
        ([{"role": "", "content": "x"}], "role=''"),
        ([{"role": "x" * 65, "content": "x"}], "1 to 64"),
        ([{"role": "user"}], "content of type NoneType"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text of type NoneType"),
        ([{"role": "user", "content": [7]}], "only text"),
        ([{"role": "user", "content": "\ud800"}], "not valid text"),
        ([{"role": "user", "content": "x", "extra": object()}], "want JSON data"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "want strings"),
        ([{"role": "a", "content": "", "tool_calls": [{}]}], "without a 'function'"),
        ([{"role": "a", "content": "", "tool_calls": 3}], "want a list"),
        (
            [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "arguments is not JSON",
        ),
        ([{"role": "u", "content": "x"}] * 20_000, "20000 messages"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        check_messages(messages)
    assert caught.value.param == "messages"


def test_endless_nesting_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(BadRequest, match="nested deeper"):
        plain_json(loop, "tools")


def test_tools() -> None:
    assert check_tools([]) is None
    assert check_tools([{"type": "function"}]) == [{"type": "function"}]
    with pytest.raises(BadRequest, match=r"tools\[0\] of type str"):
        check_tools(["f"])  # type: ignore[list-item]

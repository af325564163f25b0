"""What is refused before anything is compiled, and what the texts become."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quire.errors import BadRequest
from quire.grammar import spec
from quire.grammar.spec import brief, check_limits, grammar_text
from quire.params import SamplingParams, StructuredOutputsParams


def nested(depth: int) -> dict[str, Any]:
    """A schema of exactly `depth` levels of braces."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def test_exactly_one_is_given() -> None:
    """Red when json_object=False counts as a wish, or two wishes pass."""
    for bad in (
        {},
        {"json_object": False},
        {"json": "{}", "regex": "a"},
        {"choice": ["a"], "json_object": True},
    ):
        with pytest.raises(BadRequest, match="exactly one of json, regex, choice, grammar"):
            StructuredOutputsParams(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        {"json": 3},
        {"json": {"a": float("nan")}},
        {"json": {"a": {1, 2}}},
        {"regex": b"a"},
        {"regex": "\ud800"},
        {"choice": "abc"},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": ["a", 3]},
        {"choice": ["\udfff"]},
        {"grammar": ["start: a"]},
        {"json_object": 1},
    ],
    ids=str,
)
def test_values_of_the_wrong_kind(bad: dict[str, Any]) -> None:
    """Red when a wrong type gets through to the compiler."""
    with pytest.raises(BadRequest):
        StructuredOutputsParams(**bad)


def test_messages_do_not_repeat_what_a_client_sent() -> None:
    """Red when a megabyte of a bad request comes back as its own error message."""
    with pytest.raises(BadRequest) as caught:
        StructuredOutputsParams(choice=["x" * 100] * 10_000 + [3])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "wish",
    [
        StructuredOutputsParams(json={"type": "object", "b": [1, {"c": None}]}),
        StructuredOutputsParams(json="true"),
        StructuredOutputsParams(choice=["a", "b"]),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(regex="a+"),
    ],
    ids=lambda w: w.kind,
)
def test_params_come_through_a_wire_as_they_went_in(wish: StructuredOutputsParams) -> None:
    """Red when a field's type is one msgspec decodes to something else."""
    params = SamplingParams(structured_outputs=wish)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params
    assert hash(again.structured_outputs) == hash(wish)


@pytest.mark.parametrize(
    ("most", "too_much"),
    [
        (
            {"json": '{"a":"' + "x" * (spec.MAX_SCHEMA_BYTES - 8) + '"}'},
            {"json": '{"a":"' + "x" * (spec.MAX_SCHEMA_BYTES - 7) + '"}'},
        ),
        ({"json": nested(spec.MAX_SCHEMA_DEPTH)}, {"json": nested(spec.MAX_SCHEMA_DEPTH + 1)}),
        ({"regex": "a" * spec.MAX_REGEX_BYTES}, {"regex": "é" * (spec.MAX_REGEX_BYTES // 2 + 1)}),
        (
            {"choice": [str(i) for i in range(spec.MAX_CHOICES)]},
            {"choice": [str(i) for i in range(spec.MAX_CHOICES + 1)]},
        ),
        (
            {"choice": ["a" * (spec.MAX_CHOICE_BYTES - 1), "b"]},
            {"choice": ["a" * spec.MAX_CHOICE_BYTES, "b"]},
        ),
        (
            {"grammar": "#" * spec.MAX_GRAMMAR_BYTES},
            {"grammar": "#" * (spec.MAX_GRAMMAR_BYTES + 1)},
        ),
    ],
)
def test_limits(most: dict[str, Any], too_much: dict[str, Any]) -> None:
    """Red when a limit moves by one in either direction."""
    check_limits(StructuredOutputsParams(**most))
    with pytest.raises(BadRequest, match="want at most") as caught:
        check_limits(StructuredOutputsParams(**too_much))
    assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize("text", ["", "{", "[]", '"a"', "NaN", "[" * 30_000, '{"a": Infinity}'])
def test_schemas_that_are_not_one(text: str) -> None:
    """Red when an empty text, a list or a bomb of brackets is not a client's error."""
    with pytest.raises(BadRequest, match="JSON schema"):
        check_limits(StructuredOutputsParams(json=text))


@pytest.mark.parametrize("reference", ["http://a/b.json", "file:///etc/passwd", "other.json", ""])
def test_nothing_is_fetched(reference: str) -> None:
    """Red when a reference to another document is not refused by name."""
    schema = {"properties": {"a": {"items": [{"$ref": reference}]}}}
    with pytest.raises(BadRequest, match="nothing is ever fetched"):
        check_limits(StructuredOutputsParams(json=schema))
    # A property may be called that.
    check_limits(StructuredOutputsParams(json={"properties": {"$ref": {"type": "string"}}}))


def test_clients_cannot_set_the_compilers_options() -> None:
    """Red when a schema can switch off the bound on blanks or the check of keywords."""
    loose = {"type": "object", "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    text = grammar_text(StructuredOutputsParams(json=loose))
    options = json.loads(text)["grammars"][0]["json_schema"]["x-guidance"]
    assert options == {"whitespace_pattern": spec.WHITESPACE}


@pytest.mark.parametrize(
    ("regex", "lark"),
    [
        ("^ab$", "start: /ab/"),
        (r"ab\$", r"start: /ab\$/"),
        (r"ab\\$", r"start: /ab\\/"),
        ("a/b", r"start: /a\/b/"),
        (r"\d", "start: /[0-9]/"),
        ("a\nb", r"start: /a\nb/"),
    ],
)
def test_regex(regex: str, lark: str) -> None:
    """Red when an anchor stays, an escaped one goes, or a slash ends the pattern early."""
    text = grammar_text(StructuredOutputsParams(regex=regex))
    assert json.loads(text)["grammars"][0]["lark_grammar"] == lark


@pytest.mark.parametrize("bad", ['root ::= "a', 'other ::= "a"', "root ::= " + "(" * 5000, "a ::="])
def test_bad_ebnf_is_the_clients_error(bad: str) -> None:
    """Red when the converter's own exceptions, or its recursion, get out."""
    with pytest.raises(BadRequest, match="cannot read the grammar"):
        grammar_text(StructuredOutputsParams(grammar=bad))


def test_brief() -> None:
    """Red when a library's message can break a log line or flood a reply."""
    assert brief("a\r\n\tb\x1b[31m\x00c <non-verbose/>") == "a b[31mc"
    assert len(brief("x" * 1000)) == 300

"""String formats: dates against the calendar, and what nobody enforces left out by name."""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time
from typing import Any

import pytest

from quire.grammar.formats import COMPILED, PATTERNS, settle_formats
from quire.grammar.matcher import GrammarError
from quire.grammar.spec import ignored_formats
from quire.params import StructuredOutputsParams
from tests.grammar.cases import EOS, allowed, compiler
from tests.text.tiny_tokenizers import byte_level

TOKENS = byte_level()
COMPILER = compiler()
TEXT = {"type": "string"}


def takes(schema: dict[str, Any], value: object) -> bool:
    """Whether the grammar lets exactly this JSON value through."""
    matcher = COMPILER.compile(StructuredOutputsParams(json=schema))
    try:
        matcher.restart(TOKENS.encode(json.dumps(value)).ids)
    except GrammarError:
        return False
    return EOS in allowed(matcher)


def is_read_by(parse: Any, text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def test_exactly_the_dates_of_the_calendar() -> None:
    """Red when a month's length, or the leap year of any century, is wrong."""
    pattern = re.compile(PATTERNS["date"])
    days = [f"{month:02}-{day:02}" for month in range(14) for day in range(33)]
    centuries = [*range(1895, 1906), *range(1995, 2006), *range(2095, 2106), 1, 4, 100, 400, 9999]
    for year in centuries:
        for day in days:
            text = f"{year:04}-{day}"
            assert bool(pattern.match(text)) is is_read_by(date.fromisoformat, text), text
    for year in range(10_000):
        text = f"{year:04}-02-29"
        assert bool(pattern.match(text)) is is_read_by(date.fromisoformat, text), text
        assert bool(pattern.match(f"{year:04}-12-31")) is (year > 0)


def test_every_second_of_a_day_and_none_more() -> None:
    pattern = re.compile(PATTERNS["time"])
    for hour in range(26):
        for minute in (0, 9, 10, 59, 60, 61, 99):
            for second in (0, 9, 10, 59, 60, 61, 99):
                text = f"{hour:02}:{minute:02}:{second:02}Z"
                # Python reads 24:00:00 as the next day's midnight from 3.14 on; RFC 3339 does not.
                exists = hour < 24 and is_read_by(time.fromisoformat, text)
                assert bool(pattern.match(text)) is exists, text


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("date", ["2024-02-29", "2000-02-29"], ["5557-02-29", "2023-02-30", "1900-02-29"]),
        ("date", ["2023-04-30"], ["2023-04-31", "0000-01-01", "2023-1-1", "2023-01-01T00:00:00Z"]),
        ("time", ["23:59:59Z", "00:00:00.25-03:30"], ["23:59:60Z", "24:00:00Z", "12:00Z", "12:00"]),
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "2023-12-31T00:00:00.123456+14:00"],
            ["2023-02-29T00:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29", "2024-01-01T00:00:00"],
        ),
    ],
)
def test_the_grammar_takes_what_exists(name: str, taken: list[str], refused: list[str]) -> None:
    """Red when the compiler's own notion of a date is used, which has February 29 every year."""
    schema = {**TEXT, "format": name}
    for text in taken:
        assert takes(schema, text), text
        assert name == "time" or is_read_by(datetime.fromisoformat, text)
    for text in refused:
        assert not takes(schema, text), text


def test_a_pattern_of_the_clients_own_holds_as_well() -> None:
    """Red when our pattern replaces the schema's, or the schema's allOf is lost."""
    schema = {**TEXT, "format": "date", "pattern": "^20", "allOf": [{"pattern": "-29$"}]}
    assert takes(schema, "2024-02-29")
    for text in ("2023-02-29", "1996-02-29", "2024-02-28"):
        assert not takes(schema, text)
    assert takes({"type": ["string", "null"], "format": "date"}, None)


def test_unknown_formats_are_left_out_and_named() -> None:
    """Red when a format nobody knows makes a schema unusable, or goes without a word."""
    item = {**TEXT, "format": "iban", "maxLength": 2}
    schema = {
        "type": "object",
        "properties": {
            "a": item,
            "b": {"anyOf": [{"type": ["string", "null"], "format": "iban"}, {"format": "regex"}]},
            "n": {"type": "integer", "format": "int32"},
            "t": {**TEXT, "format": "uuid"},
        },
        "required": ["a"],
        "additionalProperties": {"type": "array", "items": item},
    }
    assert ignored_formats(StructuredOutputsParams(json=schema)) == ["iban", "regex"]
    assert takes(schema, {"a": "xy", "z": ["xy"]})
    assert not takes(schema, {"a": "xyz"})
    assert not takes(schema, {"a": "xy", "t": "no uuid"})
    assert ignored_formats(StructuredOutputsParams(regex="a")) == []


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"format": "iban"}},
        {"enum": [{"format": "iban", "enum": [1]}]},
        {"type": "object", "default": {"format": "iban"}},
        {"type": "object", "properties": {"format": {"const": "iban"}, "enum": {"type": "null"}}},
        {"type": 3, "format": 3, "allOf": 3},
    ],
    ids=str,
)
def test_what_only_looks_like_a_format_stays(schema: dict[str, Any]) -> None:
    """Red when data, or a property that is called format, is taken for the keyword."""
    assert settle_formats(schema) == (schema, [])


def test_properties_may_be_called_like_keywords() -> None:
    """Red when what stands under a name the client chose is not looked into."""
    for name in ("const", "enum", "default", "properties"):
        schema = {"properties": {name: {**TEXT, "format": "iban"}}}
        assert settle_formats(schema).ignored == ["iban"]
        assert settle_formats(schema).schema == {"properties": {name: TEXT}}


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_the_compiler_knows_what_is_left_to_it(name: str) -> None:
    """Red when a format on our list is one the compiler refuses, or lets anything through."""
    assert not takes({**TEXT, "format": name}, "!")

"""JsonScan against Python's own reader, and what it promises about every beginning of a value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.tools.json_scan import MAX_DEPTH, JsonScan

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def scan_all(text: str, sizes: list[int]) -> tuple[JsonScan, str, int]:
    """Feed in pieces of these sizes, over and over: (scan, what it gave, characters read)."""
    scan, given_out, position, turn = JsonScan(), "", 0, 0
    while position < len(text) and not (scan.is_done or scan.is_broken):
        size = sizes[turn % len(sizes)]
        turn += 1
        piece = text[position : position + size]
        end = scan.feed(piece, 0)
        given_out += scan.take()
        position += end
        if end < len(piece):
            break
    return scan, given_out, position


@settings(max_examples=100, deadline=None)
@given(VALUES, st.sampled_from([None, 1]), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_reads_what_python_writes(value: Any, indent: int | None, sizes: list[int]) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=bool(indent))
    scan, out, position = scan_all(text + " tail", sizes)
    assert scan.is_done and not scan.is_broken
    assert (out, position) == (text, len(text))


@settings(max_examples=50, deadline=None)
@given(VALUES, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_beginning_can_be_closed(value: Any, sizes: list[int]) -> None:
    text = json.dumps({"a": value})
    for end in range(1, len(text)):
        scan, out, position = scan_all(text[:end], sizes)
        assert position == end and not scan.is_broken
        assert out + scan.held == text[:end]
        json.loads(out + scan.closing)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from([*'{}[]:,"\\ \n', "0", "12", "-", ".5", "e+3", "true", "null", '"a"', "x"]),
        max_size=14,
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_agrees_with_python_about_what_is_json(tokens: list[str], sizes: list[int]) -> None:
    text = "[" + "".join(tokens) + "]"
    scan, out, position = scan_all(text, sizes)
    try:
        want, is_json = json.loads(text, strict=False), True
    except ValueError:
        want, is_json = None, False
    if is_json:
        assert scan.is_done and position == len(text)
        assert json.loads(out) == want
    elif scan.is_done and position == len(text):
        # More than JSON was accepted: only a backslash that escapes nothing may do that.
        assert "\\" in text
        json.loads(out)
    elif scan.is_broken:
        json.loads(out + scan.closing)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"a\nb\tc\x00"', "a\nb\tc\x00"),
        (r'"\d+\.\w"', r"\d+\.\w"),
        (r'"\u12"', r"\u12"),
        (r'"\u00g\u0041"', r"\u00gA"),
        (r'"\'"', r"\'"),
        ('"\\\n"', "\\\n"),
        (r'"\\\"\/\b\f\n\r\t"', '\\"/\b\f\n\r\t'),
    ],
)
def test_strings_are_mended(written: str, meant: str) -> None:
    for size in range(1, len(written) + 1):
        scan, out, _ = scan_all(written, [size])
        assert scan.is_done and json.loads(out) == meant


@pytest.mark.parametrize(
    "text", ["[01]", "[1.]", "[+1]", "[.5]", "[nul]", "[NaN]", "[1,]", '{"a":1,}', "[1 2]", "{1:2}"]
)
def test_strict_about_everything_else(text: str) -> None:
    assert scan_all(text, [1])[0].is_broken
    assert scan_all(text, [99])[0].is_broken


def test_depth_and_numbers_are_bounded() -> None:
    assert scan_all("[" * MAX_DEPTH, [7])[0].is_broken is False
    assert scan_all("[" * (MAX_DEPTH + 1), [7])[0].is_broken
    assert scan_all("[" + "1" * 129, [7])[0].is_broken
    assert scan_all("[" + "1" * 129, [999])[0].is_broken

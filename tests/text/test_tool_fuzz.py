"""Any output, cut anywhere: the same result, nothing lost, never an exception, linear work."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.reasoning import ReasoningSplitter
from tests.text.test_tool_json_scan import VALUES
from tests.text.tool_reading import FORMATS, cut, read

NAMES = st.sampled_from(["f", "get_weather", "a-b", "x.y"])
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)

# Pieces of all formats, whole and torn: joined at random they come near every wrong turn.
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_",
    "</tool",
    "call>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[TOOL_",
    "[ARGS]",
    "[CALL_ID]",
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "f", "parameters": {}}',
    '{"name": "f"',
    '{"arguments": {"x": "',
    ', "arguments": ',
    '"name"',
    "f[ARGS]",
    "[f(a=1)]",
    "[f(b='",
    "g()",
    *'{}[]():,;"\\<|\n ',
    "\\u00",
    "tru",
    "12",
    "-",
    "é",
    "word ",
]
OUTPUTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


@st.composite
def cut_outputs(draw: st.DrawFn, outputs: st.SearchStrategy[str]) -> list[str]:
    text = draw(outputs)
    places = draw(st.lists(st.integers(0, len(text)), max_size=8))
    bounds = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def texts_of(name: str, output: str) -> set[str]:
    """What an output without calls may be read as: all of it, or a forced call that was torn."""
    return {output, ""} if name == "forced" else {output}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(pieces=cut_outputs(OUTPUTS))
def test_cuts_do_not_matter(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = read(FORMATS[name](), [text])
    assert read(FORMATS[name](), pieces) == whole
    assert read(FORMATS[name](), cut(text, 1)) == whole
    assert whole.calls or whole.text in texts_of(name, text)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50, deadline=None)
@given(pieces=cut_outputs(st.text(max_size=60)))
def test_arbitrary_text_comes_back(name: str, pieces: list[str]) -> None:
    reading = read(FORMATS[name](), pieces)
    assert reading.calls or reading.text in texts_of(name, "".join(pieces))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NAMES, OBJECTS), min_size=1, max_size=3), st.integers(1, 9))
def test_every_call_is_read_in_every_format(
    calls: list[tuple[str, dict[str, Any]]], size: int
) -> None:
    def joined(separator: str, key: str, frame: str = "%s") -> str:
        return separator.join(frame % json.dumps({"name": n, key: a}) for n, a in calls)

    spelled = {
        "hermes": joined("\n", "arguments", "<tool_call>\n%s\n</tool_call>"),
        "llama3_json": joined("; ", "parameters"),
        "mistral": f"[TOOL_CALLS][{joined(', ', 'arguments')}]",
        "forced": f"[{joined(', ', 'parameters')}]",
    }
    for name, output in spelled.items():
        assert read(FORMATS[name](), cut(output, size)).plain() == ("", calls)
    named = "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)
    assert read(FORMATS["mistral"](), cut(named, size)).plain() == ("", calls)


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab'\"\\\n\té☃", max_size=4), inner, max_size=3)
        | st.text("ab'\"\\\n\té☃()[]", max_size=8)
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b_c", "d1"]), LITERALS), st.integers(1, 9))
def test_python_literals_are_read_as_python_does(arguments: dict[str, Any], size: int) -> None:
    output = f"[f({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]"
    assert read(FORMATS["pythonic"](), cut(output, size)).plain() == ("", [("f", arguments)])


# ------------------------------------------------------------ work


def adversaries(size: int) -> Iterator[tuple[str, str, str]]:
    """(format, what it attacks, output of about this many characters)."""

    def filled(head: str, unit: str) -> str:
        return head + unit * (size // len(unit))

    openers = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "pythonic": "<|python_start|>"}
    for name in FORMATS:
        opener = openers.get(name, "")
        flowing = opener + '{"name":"f","arguments":{"a":'
        yield name, "text", filled("", "word ")
        yield name, "torn markers", filled("", (opener or "<|python_tag|>")[:-1])
        yield name, "markers", filled("", opener or "<|python_tag|>")
        yield name, "space", filled(opener, " ")
        yield name, "space in a call", filled(opener + '{"name"', " ")
        yield name, "open key", filled(opener + '{"', "x")
        yield name, "open name", filled(opener + '{"name":"', "x")
        yield name, "open string", filled(flowing + '"', "x")
        yield name, "broken escapes", filled(flowing + '"', "\\u00")
        yield name, "line breaks", filled(flowing + '"', "\n")
        yield name, "array", filled(flowing + "[", "1,")
        yield name, "space after a comma", filled(flowing + "[1,", " ")
        yield name, "digits", filled(flowing, "1")
        yield name, "brackets", filled(opener, "[")
        yield name, "late name", filled(opener + '{"arguments":{"a":"', "y") + '"},"name":"f"}'
        yield name, "calls", filled("", opener + '{"name":"f","arguments":{}}')
        yield name, "list of calls", filled(opener + "[", '{"name":"f","arguments":{}},')
        yield name, "separators", filled(opener + '{"name":"f","arguments":{}}', ";")
        yield name, "python string", filled(opener + "[f(a='", "\\x")
        yield name, "python calls", filled(opener + "[", "f(a=1),")


class Lines:
    """Counts the lines of Python that run in the text package."""

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if "quire/text" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self.trace


class Watched(str):
    """A string that knows how many of its characters were looked at or copied."""

    looked = 0

    def __getitem__(self, key: Any) -> str:
        got = super().__getitem__(key)
        Watched.looked += len(got)
        return got

    def find(self, sub: str, start: Any = 0, end: Any = None) -> int:
        got = super().find(sub, start, end)
        Watched.looked += (len(self) if got < 0 else got) - start + len(sub)
        return got

    def rfind(self, sub: str, start: Any = 0, end: Any = None) -> int:
        Watched.looked += len(self) - start
        return super().rfind(sub, start, end)

    def startswith(self, prefix: Any, start: Any = 0, end: Any = None) -> bool:
        Watched.looked += len(prefix)
        return super().startswith(prefix, start, end)


def work(parser: Any, pieces: list[str]) -> int:
    """Lines run, plus characters of the input looked at."""
    lines, Watched.looked = Lines(), 0
    before = sys.gettrace()
    sys.settrace(lines.trace)
    try:
        for piece in pieces:
            parser.push(Watched(piece))
        parser.finish()
    finally:
        sys.settrace(before)
    return lines.count + Watched.looked


@pytest.mark.parametrize(("size", "length"), [(1, 120), (32, 500), (9999, 500)])
def test_work_is_linear_in_the_output(size: int, length: int) -> None:
    """Red when text is scanned again, or copied again, for every piece or every marker."""
    for (name, what, once), (_, _, twice) in zip(
        adversaries(length), adversaries(2 * length), strict=True
    ):
        small = work(FORMATS[name](), cut(once, size))
        large = work(FORMATS[name](), cut(twice, size))
        assert large <= 2.3 * small + 400, (name, what)
        assert large <= 90 * len(twice), (name, what)


def test_reasoning_is_linear_too() -> None:
    for unit in ("word ", "</think", "\n", "<think>", " "):
        for size in (1, 64):
            small, large = (
                work(ReasoningSplitter("<think>", "</think>", True), cut(unit * n, size))
                for n in (300, 600)
            )
            assert large <= 2.3 * small + 400, unit


MEGABYTE = ["torn markers", "open key", "space after a comma", "brackets", "python string"]


@pytest.mark.parametrize("name", FORMATS)
def test_a_megabyte_of_anything_loses_nothing(name: str) -> None:
    for other, what, output in adversaries(1_000_000):
        if other == name and what in MEGABYTE:
            reading = read(FORMATS[name](), [output])
            assert reading.calls or reading.text in texts_of(name, output), what

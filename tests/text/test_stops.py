"""Stop strings: every way of cutting the text must give what a search of the whole text gives."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.stops import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop that is complete first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            assert matcher.push("more") == ("", stop)
            assert matcher.flush() == ""
            return shown, stop
    return shown + matcher.flush(), None


def chunkings(text: str) -> list[list[str]]:
    cuts = range(1, len(text))
    return [
        [text[a:b] for a, b in itertools.pairwise((0, *chosen, len(text)))]
        for n in range(len(text))
        for chosen in itertools.combinations(cuts, n)
    ]


CASES = [
    ("hello\n\nworld", ["\n\n"]),
    ("aaab", ["aab"]),
    ("abcabd", ["abd"]),
    ("abababc", ["ababc"]),
    ("xabcx", ["abc", "b"]),
    ("xabcx", ["bc", "abc"]),
    ("aabaaab", ["aaab", "baa"]),
    ("stop", ["stop"]),
    ("sto", ["stop"]),
    ("日本語。終", ["。終"]),
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("text", "stops"), CASES)
def test_every_chunking_agrees_with_a_search(text: str, stops: list[str], include: bool) -> None:
    want = naive(text, stops, include)
    for pieces in chunkings(text):
        assert run(pieces, stops, include) == want, pieces


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", max_size=5), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_random_texts_agree_with_a_search(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert run(pieces, stops, include) == naive("".join(pieces), stops, include)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("abc", max_size=4), max_size=6),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_holds_back_no_more_than_could_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        delta, stop = matcher.push(piece)
        if stop is not None:
            return
        shown += delta
        held = max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        assert len(shown) == len(text) - held


def test_no_stops_passes_everything_through() -> None:
    assert StopMatcher([]).push("anything") == ("anything", None)


def test_repetitive_text_and_stop_take_linear_time() -> None:
    matcher = StopMatcher(["a" * 5000 + "b"])
    begin = time.thread_time()
    for _ in range(20_000):
        matcher.push("aaaaa")
    assert time.thread_time() - begin < 5.0  # quadratic matching would need hours

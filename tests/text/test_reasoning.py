"""Reasoning told apart from the answer, wherever the pieces are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import NotSupported
from quire.text.reasoning import (
    Content,
    Reasoning,
    ReasoningSplitter,
    detect_reasoning,
    reasoning_splitter,
    starts_inside,
)
from tests.text.tool_reading import chunkings, cut


def split(pieces: list[str], inside: bool) -> tuple[str, str]:
    """(reasoning, content); reasoning never follows content."""
    splitter = ReasoningSplitter("<think>", "</think>", inside)
    parts = [part for piece in pieces for part in splitter.push(piece)] + splitter.finish()
    assert all(part.text for part in parts)
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=[Reasoning, Content].index)
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return thought, "".join(part.text for part in parts if isinstance(part, Content))


@pytest.mark.parametrize(
    ("inside", "output", "reasoning", "content"),
    [
        (False, "<think>\nhm\n\nyes\n</think>\n\nFour.", "hm\n\nyes", "Four."),  # Qwen 3
        (True, "Okay, so\n</think>\n\nFour.\n", "Okay, so", "Four.\n"),  # after "<think>\n"
        (True, "<think>\nOkay\n</think>Four.", "Okay", "Four."),  # opened once more
        (True, "\n\nOkay", "Okay", ""),
        (True, "never ends\n", "never ends\n", ""),
        (True, "cut in the mark</thi", "cut in the mark</thi", ""),
        (False, "  \n<think>x</think>y", "x", "y"),
        (False, "<think>\n\n</think>\n\nFour.", "", "Four."),
        (False, "Four.", "", "Four."),
        (False, "\n Four.", "", "\n Four."),
        (False, "<thin air", "", "<thin air"),
        (False, "  <thi", "", "  <thi"),
        (False, "The <think> tag ends with </think>.", "", "The <think> tag ends with </think>."),
        (True, "a</think>b</think>\n<think>c", "a", "b</think>\n<think>c"),
        (True, " </ think> </think> x", " </ think> ", " x"),
        (True, "", "", ""),
        (False, " ", "", " "),
    ],
)
def test_outputs_as_models_write_them(
    inside: bool, output: str, reasoning: str, content: str
) -> None:
    for pieces in chunkings(output):
        assert split(pieces, inside) == (reasoning, content), pieces


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "</", "nk>", "\n", " ", "word"]),
        max_size=10,
    ),
    st.booleans(),
    st.integers(1, 7),
)
def test_cuts_do_not_matter(fragments: list[str], inside: bool, size: int) -> None:
    text = "".join(fragments)
    whole = split([text], inside)
    assert split(cut(text, size), inside) == whole
    if not inside and not text.lstrip().startswith("<think>"):
        assert whole == ("", text)


def test_reasoning_flows() -> None:
    splitter = ReasoningSplitter("<think>", "</think>", inside=True)
    assert splitter.push("one ") == [Reasoning("one ")]
    assert splitter.push("two\n") == [Reasoning("two")]
    assert splitter.push("three <") == [Reasoning("\nthree ")]


@pytest.mark.parametrize(
    ("template", "prompt", "name"),
    [
        (None, "", None),
        ("{{ messages }}", "<|im_start|>assistant\n", None),
        ("{{ content.split('</think>')[-1] }}{{ '<｜Assistant｜><think>\\n' }}", "", "deepseek_r1"),
        ("{% if enable_thinking is false %}<think>\n\n</think>{% endif %}", "", "qwen3"),
        ("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", "", "mistral"),
        ("Write 'Here is my thought process:' first", "", "granite"),
        (None, "user: hi\nassistant: <think>\n", "deepseek_r1"),
    ],
)
def test_markers_of_a_model(template: str | None, prompt: str, name: str | None) -> None:
    assert detect_reasoning(template, prompt) == name


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<｜Assistant｜><think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("", False),
    ],
)
def test_where_the_output_starts(prompt: str, inside: bool) -> None:
    assert starts_inside("qwen3", prompt) is inside
    (first,) = reasoning_splitter("qwen3", prompt).push("so")
    assert first == (Reasoning("so") if inside else Content("so"))


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(NotSupported, match="did you mean 'qwen3'"):
        reasoning_splitter("qwen4", "")

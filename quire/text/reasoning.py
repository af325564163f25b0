"""ReasoningSplitter: what a model thinks before it answers, told apart from the answer.

Reasoning stands between two markers at the very beginning of the output; a marker later on is
text about markers. Often the prompt has written the first marker already, so the output starts
inside. The newlines next to the markers are layout, as in the templates that put them there. Like
all readers of model output it is linear and does not care where the pieces were cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from quire.registry import Registry
from quire.text.tools.marker import Marker

PROMPT_TAIL = 256  # characters: where a prompt ends, and no more of it


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


Piece: TypeAlias = Reasoning | Content


class ReasoningMarks(NamedTuple):
    start: str
    end: str


THINK = ReasoningMarks("<think>", "</think>")
MISTRAL_THINK = ReasoningMarks("[THINK]", "[/THINK]")
GRANITE_THOUGHT = ReasoningMarks("Here is my thought process:", "Here is my response:")

REASONING = Registry(
    "reasoning parser",
    {
        "deepseek_r1": "quire.text.reasoning:THINK",
        "granite": "quire.text.reasoning:GRANITE_THOUGHT",
        "mistral": "quire.text.reasoning:MISTRAL_THINK",
        "qwen3": "quire.text.reasoning:THINK",
    },
)


class ReasoningSplitter:
    """
    >>> splitter = ReasoningSplitter("<think>", "</think>", inside=True)
    >>> splitter.push("hm\\n</thi"), splitter.push("nk>\\n\\nYes")
    ([Reasoning(text='hm')], [Content(text='Yes')])
    """

    def __init__(self, start: str, end: str, inside: bool) -> None:
        self._start, self._end = start, Marker(end)
        self._is_inside = inside
        self._step: Callable[[ReasoningSplitter, str, int], int] = ReasoningSplitter._at_start
        self._held: list[str] = []  # space before the start marker
        self._num_matched = 0  # characters of the start marker that were read
        self._newlines = 0  # that end the reasoning so far
        self._has_reasoning = False
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        i, end = 0, len(text)
        while i < end:
            i = self._step(self, text, i)
        return self._take()

    def finish(self) -> list[Piece]:
        """What was held back, as it stands; call once, at the end."""
        if self._step is ReasoningSplitter._at_start:
            self._settle()
        if self._step is ReasoningSplitter._reasoning:
            self._write_reasoning(self._end.flush())
            if self._has_reasoning and self._newlines:
                self._pieces.append(Reasoning("\n" * self._newlines))
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _at_start(self, text: str, i: int) -> int:
        if self._num_matched == 0 and text[i].isspace():
            self._held.append(text[i])
            return i + 1
        rest = self._start[self._num_matched : self._num_matched + len(text) - i]
        if not text.startswith(rest, i):
            self._settle()
            return i
        self._num_matched += len(rest)
        if self._num_matched == len(self._start):
            self._step = ReasoningSplitter._reasoning
        return i + len(rest)

    def _settle(self) -> None:
        """There is no start marker: what was held back is the output's own beginning."""
        beginning = "".join(self._held) + self._start[: self._num_matched]
        self._step = ReasoningSplitter._reasoning if self._is_inside else ReasoningSplitter._content
        i = 0
        while i < len(beginning):
            i = self._step(self, beginning, i)

    def _reasoning(self, text: str, i: int) -> int:
        if self._end.is_absent(text, i):
            self._write_reasoning(text[i:])
            return len(text)
        seek = self._end.seek(text, i)
        self._write_reasoning(seek.plain)
        if seek.is_found:
            self._step = ReasoningSplitter._before_content
        return seek.end

    def _write_reasoning(self, text: str) -> None:
        if not self._has_reasoning:
            text = text.lstrip("\n")
        body = text.rstrip("\n")
        if body:
            self._pieces.append(Reasoning("\n" * self._newlines + body))
            self._has_reasoning, self._newlines = True, 0
        self._newlines += len(text) - len(body)

    def _before_content(self, text: str, i: int) -> int:
        while i < len(text) and text[i] == "\n":
            i += 1
        if i < len(text):
            self._step = ReasoningSplitter._content
        return i

    def _content(self, text: str, i: int) -> int:
        self._pieces.append(Content(text[i:]))
        return len(text)


def reasoning_splitter(name: str, prompt_text: str) -> ReasoningSplitter:
    """For one completion of this prompt. Raises NotSupported with the names there are."""
    marks: ReasoningMarks = REASONING.get(name)
    return ReasoningSplitter(marks.start, marks.end, starts_inside(name, prompt_text))


def starts_inside(name: str, prompt_text: str) -> bool:
    """Whether the prompt ends with the start marker, so that the output begins as reasoning."""
    marks: ReasoningMarks = REASONING.get(name)
    return prompt_text[-PROMPT_TAIL:].rstrip().endswith(marks.start)


def detect_reasoning(chat_template: str | None, prompt_text: str = "") -> str | None:
    """The markers a model thinks between, by its template or else by its prompt; None if none."""
    template = chat_template or ""
    if MISTRAL_THINK.start in template:
        return "mistral"
    if GRANITE_THOUGHT.start in template:
        return "granite"
    if THINK.end in template:
        is_switched = "enable_thinking" in template or "reasoning_content" in template
        return "qwen3" if is_switched else "deepseek_r1"
    return "deepseek_r1" if starts_inside("deepseek_r1", prompt_text) else None

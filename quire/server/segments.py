"""Segments: one answer's parts grouped into runs of text, of reasoning, and single calls, in order.

Responses calls them output items, Messages content blocks. `Segments.take` folds a piece in and
says what changed; a stream is made of the changes and a whole answer of the finished segments, so
the two cannot disagree. What either looks like on the wire is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from quire.server.prompting import Piece
from quire.text.tools.parser import CallArguments, CallStart, TextPart
from quire.text.tools.router import ReasoningPart, RoutedPart

TokenLogprob: TypeAlias = dict[str, Any]


class Kind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Segment:
    """A run of one kind; a call's text is the JSON text of its arguments."""

    kind: Kind
    index: int
    name: str = ""  # of the tool
    call_id: str = ""
    is_cut: bool = False  # the output ended before this did
    closing: str = ""  # what would make the arguments of a cut call valid JSON
    logprobs: list[TokenLogprob] = field(default_factory=list)
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def blank(self) -> Segment:
        """The same before it said anything: it may have grown by the time its opening is told."""
        return Segment(self.kind, self.index, self.name, self.call_id)

    def grow(self, delta: str, logprobs: Sequence[TokenLogprob]) -> None:
        self._pieces.append(delta)
        self.logprobs += logprobs


class Opened(NamedTuple):
    segment: Segment


class Grew(NamedTuple):
    segment: Segment
    delta: str
    logprobs: Sequence[TokenLogprob]


class Closed(NamedTuple):
    segment: Segment


Change: TypeAlias = Opened | Grew | Closed


class Segments:
    """What an answer has said so far. When it is finished there is at least one segment."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self._is_open = False
        self._num_before_answer = 0  # tokens before the first text or call
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is being held back
        self._num_latest = 0  # of those, the ones this piece brought
        self._changes: list[Change] = []

    @property
    def num_reasoning(self) -> int:
        """Tokens spent on reasoning, markers included."""
        has_reasoning = bool(self.all) and self.all[0].kind is Kind.REASONING
        return self._num_before_answer if has_reasoning else 0

    def take(self, piece: Piece, logprobs: Sequence[TokenLogprob] = ()) -> list[Change]:
        """Fold a piece in, with the logprobs of its tokens if they are wanted."""
        self._waiting += logprobs
        self._num_latest = len(logprobs)
        for part in piece.parts:
            self._take_part(part)
        if all(segment.kind is Kind.REASONING for segment in self.all):
            self._num_before_answer += len(piece.event.token_ids)
        if piece.finish is not None:
            self._end(piece)
        changes, self._changes = self._changes, []
        return changes

    def cut(self) -> None:
        """The answer breaks off here, in the middle of what is open."""
        if self._is_open:
            self.all[-1].is_cut = True

    def _take_part(self, part: RoutedPart) -> None:
        if isinstance(part, TextPart):
            self._run(Kind.TEXT, part.text)
        elif isinstance(part, ReasoningPart):
            self._run(Kind.REASONING, part.text)
        elif isinstance(part, CallStart):
            self._open(Segment(Kind.CALL, len(self.all), part.name, part.id))
        elif isinstance(part, CallArguments):
            self._grow(part.delta)
        else:
            self.all[-1].is_cut, self.all[-1].closing = True, part.closing

    def _run(self, kind: Kind, text: str) -> None:
        if not text:
            return
        if not (self._is_open and self.all[-1].kind is kind):
            self._open(Segment(kind, len(self.all)))
        self._grow(text)

    def _open(self, segment: Segment) -> None:
        self._close()
        if self.all:  # what was held back until now was the marker between the two
            self._waiting = self._waiting[len(self._waiting) - self._num_latest :]
        self.all.append(segment)
        self._is_open = True
        self._changes.append(Opened(segment))

    def _grow(self, delta: str) -> None:
        segment = self.all[-1]
        # Only text shows logprobs; those of thoughts, calls and their markers go.
        logprobs = self._waiting if segment.kind is Kind.TEXT else []
        self._waiting, self._num_latest = [], 0
        segment.grow(delta, logprobs)
        self._changes.append(Grew(segment, delta, logprobs))

    def _close(self) -> None:
        if self._is_open:
            self._changes.append(Closed(self.all[-1]))
        self._is_open = False

    def _end(self, piece: Piece) -> None:
        self.finish, self.stop_reason = piece.finish, piece.event.stop_reason
        if not self.all:
            self._open(Segment(Kind.TEXT, 0))
        last = self.all[-1]
        if piece.finish == "length" and last.kind is not Kind.CALL:
            last.is_cut = True  # a call says so itself
        if last.closing and self.finish == "stop" and not isinstance(self.stop_reason, str):
            self.finish = "length"  # ended inside a call: no more complete than for lack of room
        self._close()

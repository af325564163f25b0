"""MarkedParser: text until a marker, calls inside, then text again.

Every format is a `Markup`: the marker that opens a stretch of calls, what reads the inside, and the
marker that closes it, if there is one. A stretch that holds no call comes out as the text it is,
marker included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.text.tools.json_scan import SPACE, skip_space
from quire.text.tools.marker import Marker
from quire.text.tools.parser import NewId, Part
from quire.text.tools.writer import PartWriter


class CallBody(Protocol):
    """Reads the calls of one stretch and writes them; text is the parser's to write."""

    @property
    def is_over(self) -> bool:
        """Whether the stretch has ended, well or badly."""
        ...

    @property
    def has_calls(self) -> bool: ...

    @property
    def leftover(self) -> str:
        """What was read and belongs to no call."""
        ...

    def feed(self, text: str, start: int) -> int:
        """Read from `start`; the index of the first character that is not the stretch's."""
        ...

    def finish(self) -> None:
        """The output ends here: a call under way is cut."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    body: Callable[[PartWriter], CallBody]
    opener: str = ""  # none: calls can only be the whole output
    closer: str = ""
    starts_inside: bool = False  # whether the output may begin with calls, unmarked
    is_all_calls: bool = False  # a grammar lets nothing else by: a call torn at the end is no text


class MarkedParser:
    """A `ToolParser` for any markup."""

    def __init__(self, markup: Markup, new_id: NewId) -> None:
        self._markup = markup
        self._writer = PartWriter(new_id)
        self._opener = Marker(markup.opener) if markup.opener else None
        self._body: CallBody | None = None
        self._kept = ""  # the marker before a body that has no calls yet
        self._after: list[str] = []  # space between a body and its closer
        self._num_closed = 0  # characters of the closer that were read
        self._step: Callable[[MarkedParser, str, int], int] = MarkedParser._in_text
        if markup.starts_inside:
            self._enter("")

    def push(self, text: str) -> list[Part]:
        i, end = 0, len(text)
        while i < end:
            i = self._step(self, text, i)
        return self._writer.take()

    def finish(self) -> list[Part]:
        if self._body is not None:
            self._body.finish()
            if not self._markup.is_all_calls:
                self._write_leftover(self._body)
        elif self._opener is not None:
            self._writer.text(self._opener.flush())
        self._writer.text("".join(self._after))  # a closer that was begun is no loss
        return self._writer.finish()

    def _in_text(self, text: str, i: int) -> int:
        opener = self._opener
        if opener is None or opener.is_absent(text, i) or self._writer.is_full:
            self._writer.text(text[i:])
            return len(text)
        seek = opener.seek(text, i)
        self._writer.text(seek.plain)
        if seek.is_found:
            self._enter(self._markup.opener)
        return seek.end

    def _enter(self, opener: str) -> None:
        self._body = self._markup.body(self._writer)
        self._kept = opener
        self._step = MarkedParser._in_body

    def _in_body(self, text: str, i: int) -> int:
        body = self._body
        assert body is not None
        i = body.feed(text, i)
        if body.is_over:
            self._body = None
            if body.has_calls and self._markup.closer:
                self._after, self._num_closed = [body.leftover], 0
                self._step = MarkedParser._before_closer
            else:
                self._write_leftover(body)
                self._step = MarkedParser._in_text
        return i

    def _write_leftover(self, body: CallBody) -> None:
        self._writer.text(body.leftover if body.has_calls else self._kept + body.leftover)

    def _before_closer(self, text: str, i: int) -> int:
        closer = self._markup.closer
        if self._num_closed == 0 and text[i] in SPACE:
            end = skip_space(text, i)
            self._after.append(text[i:end])
            return end
        rest = closer[self._num_closed : self._num_closed + len(text) - i]
        if not text.startswith(rest, i):
            self._leave("".join(self._after))
            self._in_text(closer[: self._num_closed], 0)  # it may begin the opener instead
            return i
        self._num_closed += len(rest)
        if self._num_closed == len(closer):
            self._leave("")
        return i + len(rest)

    def _leave(self, leftover: str) -> None:
        self._after = []
        self._writer.text(leftover)
        self._step = MarkedParser._in_text

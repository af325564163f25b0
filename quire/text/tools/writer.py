"""PartWriter: collects the parts of one completion and numbers its calls.

Whitespace around calls is layout, not content: what stands before, between and after them is
dropped when there is nothing else. If no call comes, all of it is text.
"""

from __future__ import annotations

from quire.text.tools.parser import CallArguments, CallCut, CallStart, NewId, Part, TextPart

MAX_CALLS = 1_000


class PartWriter:
    """Readers write into it, the parser takes out."""

    def __init__(self, new_id: NewId) -> None:
        self.num_calls = 0
        self._new_id = new_id
        self._parts: list[Part] = []
        self._blank: list[str] | None = []  # None once there is text since the last call

    @property
    def is_full(self) -> bool:
        """Whether there are as many calls as one output may hold; the rest of it is text."""
        return self.num_calls >= MAX_CALLS

    def text(self, piece: str) -> None:
        if not piece:
            return
        if self._blank is not None:
            self._blank.append(piece)
            if piece.isspace():
                return
            piece, self._blank = "".join(self._blank), None
        self._parts.append(TextPart(piece))

    def start(self, name: str) -> None:
        """Begin the next call; `arguments` and `cut` are about this one from here on."""
        self._parts.append(CallStart(self.num_calls, name, self._new_id()))
        self.num_calls += 1
        self._blank = []

    def arguments(self, delta: str) -> None:
        if delta:
            self._parts.append(CallArguments(self.num_calls - 1, delta))

    def break_off(self, closing: str) -> None:
        """The arguments went wrong: end them as they stand."""
        self.arguments(closing)
        self.cut("")

    def cut(self, closing: str) -> None:
        self._parts.append(CallCut(self.num_calls - 1, closing))

    def take(self) -> list[Part]:
        """What was written since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        if self._blank and not self.num_calls:
            self._parts.append(TextPart("".join(self._blank)))
        self._blank = []
        return self.take()

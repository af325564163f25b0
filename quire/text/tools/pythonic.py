"""Pythonic calls: the output is `[f(a=1), g(b="x")]`, as Llama 4 and some Llama 3.2 write it.

The list is held back until its last bracket, bounded in length and depth, then read as a whole by
`python_calls.py`: half a Python literal is not yet JSON. Llama 4 may put `<|python_start|>` and
`<|python_end|>` around it.
"""

from __future__ import annotations

from quire.text.tools.json_scan import MAX_DEPTH
from quire.text.tools.marked import MarkedParser, Markup
from quire.text.tools.parser import NewId, openai_call_id
from quire.text.tools.python_calls import NotACall, read_calls
from quire.text.tools.writer import MAX_CALLS, PartWriter

OPENER = "<|python_start|>"
CLOSER = "<|python_end|>"
MAX_CHARS = 65_536


class PythonicBody:
    """Collects one bracketed list, then writes its calls."""

    def __init__(self, writer: PartWriter) -> None:
        self.is_over = False
        self.has_calls = False
        self._writer = writer
        self._kept: list[str] = []
        self._room = MAX_CHARS
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._expects = "["  # then "name": an answer may well begin with a bracket

    @property
    def leftover(self) -> str:
        return "".join(self._kept)

    def feed(self, text: str, start: int) -> int:
        i, end = start, min(len(text), start + self._room)
        while i < end and not self.is_over:
            if not self._take(text[i]):
                self.is_over = True
                break
            i += 1
        self._kept.append(text[start:i])
        self._room -= i - start
        if self.is_over and self._depth == 0 and not self._expects:
            self._write_calls()
        self.is_over = self.is_over or not self._room
        return i

    def finish(self) -> None:
        """A list that is not whole holds no call."""

    def _take(self, char: str) -> bool:
        """Follow brackets and strings; False if this character cannot belong to the list."""
        if self._quote:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == self._quote:
                self._quote = ""
        elif self._expects:
            return self._take_first(char)
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
            return self._depth <= MAX_DEPTH
        elif char in ")]}":
            self._depth -= 1
            self.is_over = self._depth == 0
        return True

    def _take_first(self, char: str) -> bool:
        if char.isspace():
            return True
        if self._expects == "[":
            self._depth, self._expects = 1, "name"
            return char == "["
        self._expects = ""
        return char.isalpha() or char == "_"

    def _write_calls(self) -> None:
        try:
            calls = read_calls(self.leftover)
        except NotACall:
            return
        if self._writer.num_calls + len(calls) > MAX_CALLS:
            return
        for call in calls:
            self._writer.start(call.name)
            self._writer.arguments(call.arguments)
        self.has_calls = True
        self._kept.clear()


PYTHONIC = Markup(opener=OPENER, body=PythonicBody, closer=CLOSER, starts_inside=True)


def pythonic_parser(new_id: NewId = openai_call_id) -> MarkedParser:
    return MarkedParser(PYTHONIC, new_id)

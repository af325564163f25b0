"""CallList: a JSON array of calls, or bare call objects one after another.

This is the inside of most formats: `[{...}, {...}]`, `{...}; {...}` or a single `{...}`. Bare
calls may be separated by space, commas or semicolons; the first other character ends the list and
is left to whoever reads on.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.call_reader import CallReader
from quire.text.tools.json_scan import SPACE, skip_space
from quire.text.tools.writer import PartWriter

SEPARATORS = ",;"


class CallList:
    """Writes calls; feed it from the first character inside the markers on."""

    def __init__(self, writer: PartWriter, may_lack_arguments: bool = True) -> None:
        self.is_over = False
        self.has_calls = False
        self._writer = writer
        self._may_lack_arguments = may_lack_arguments
        self._step: Callable[[CallList, str, int], int] = CallList._before_first
        self._reader: CallReader | None = None
        self._is_array = False
        self._kept: list[str] = []  # read since the last call

    def feed(self, text: str, start: int) -> int:
        i, end = start, len(text)
        while i < end and not self.is_over:
            i = self._step(self, text, i)
        return i

    def finish(self) -> None:
        if self._reader is not None:
            self._reader.finish()
            self._kept.append(self._reader.leftover)

    @property
    def leftover(self) -> str:
        return "".join(self._kept)

    def _before_first(self, text: str, i: int) -> int:
        if text[i] == "[":
            self._is_array, self._step = True, CallList._before_item
            return self._keep(text, i, i + 1)
        return self._before_item(text, i)

    def _before_item(self, text: str, i: int) -> int:
        if text[i] in SPACE:
            return self._keep(text, i, skip_space(text, i))
        if text[i] != "{" or self._writer.is_full:
            return self._end(i)
        self._reader = CallReader(self._writer, self._may_lack_arguments)
        self._step = CallList._in_item
        return i

    def _in_item(self, text: str, i: int) -> int:
        reader = self._reader
        assert reader is not None
        i = reader.feed(text, i)
        if reader.has_call:
            self.has_calls = True
            self._kept.clear()
        if reader.is_over:
            self._kept.append(reader.leftover)
            self.is_over = reader.is_broken
            self._reader = None
            self._step = CallList._after_item if self._is_array else CallList._after_bare
        return i

    def _after_item(self, text: str, i: int) -> int:
        if text[i] in SPACE:
            return self._keep(text, i, skip_space(text, i))
        if text[i] == ",":
            self._step = CallList._before_item
            return self._keep(text, i, i + 1)
        if text[i] != "]":
            return self._end(i)
        self._kept.clear()
        return self._end(i + 1)

    def _after_bare(self, text: str, i: int) -> int:
        if text[i] in SEPARATORS:
            return self._keep(text, i, i + 1)
        return self._before_item(text, i)

    def _keep(self, text: str, start: int, end: int) -> int:
        self._kept.append(text[start:end])
        return end

    def _end(self, i: int) -> int:
        self.is_over = True
        return i

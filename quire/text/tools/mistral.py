"""Mistral calls: `[TOOL_CALLS]` and then a JSON array, or a name with its arguments.

Models up to Mistral Large 2 write `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, later ones
`[TOOL_CALLS]name[ARGS]{...}` with the marker before each call, some with `[CALL_ID]` and an id in
between. The ids that go out have the nine characters Mistral's templates insist on.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.text.tools.call_list import CallList
from quire.text.tools.json_scan import JsonScan, skip_space
from quire.text.tools.marked import CallBody, MarkedParser, Markup
from quire.text.tools.parser import NewId, is_call_name, mistral_call_id
from quire.text.tools.writer import PartWriter

OPENER = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
MAX_HEAD_CHARS = 256


class _NamedCall:
    """`name[ARGS]{...}`; feed it from the name on."""

    def __init__(self, writer: PartWriter) -> None:
        self.is_over = False
        self.has_calls = False
        self.leftover = ""
        self._writer = writer
        self._scan = JsonScan()

    def feed(self, text: str, start: int) -> int:
        i = start
        if not self.has_calls:
            i = self._read_head(text, start)
        if not self.has_calls:
            return i
        i = self._scan.feed(text, i)
        self._writer.arguments(self._scan.take())
        if self._scan.is_broken:
            self._writer.break_off(self._scan.closing)
            self.leftover = self._scan.held
        self.is_over = self._scan.is_broken or self._scan.is_done
        return i

    def finish(self) -> None:
        if self.has_calls:
            self._writer.cut(self._scan.closing)

    def _read_head(self, text: str, start: int) -> int:
        """Everything up to the brace; bounded, so that a name that never ends is text soon."""
        room = MAX_HEAD_CHARS - len(self.leftover)
        brace = text.find("{", start, start + room)
        end = brace if brace >= 0 else min(len(text), start + room)
        self.leftover += text[start:end]
        if brace >= 0 and (name := _name_in(self.leftover)):
            self._writer.start(name)
            self.has_calls, self.leftover = True, ""
        self.is_over = not self.has_calls and (brace >= 0 or len(self.leftover) == MAX_HEAD_CHARS)
        return end


def _name_in(head: str) -> str:
    """The name in `name`, `name[ARGS]` or `name[CALL_ID]id[ARGS]`; "" if it is none of them."""
    name, _, id = head.strip().removesuffix(ARGS).partition(CALL_ID)
    is_sound = is_call_name(name) and (not id or id.isalnum())
    return name if is_sound else ""


class MistralBody:
    """Decides between the two forms at the first character that is not space."""

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._space: list[str] = []
        self._body: CallBody | None = None

    @property
    def is_over(self) -> bool:
        return self._body is not None and self._body.is_over

    @property
    def has_calls(self) -> bool:
        return self._body is not None and self._body.has_calls

    @property
    def leftover(self) -> str:
        rest = "" if self._body is None else self._body.leftover
        return rest if self.has_calls else "".join(self._space) + rest

    def feed(self, text: str, start: int) -> int:
        i = start
        if self._body is None:
            i = skip_space(text, start)
            self._space.append(text[start:i])
            if i == len(text):
                return i
            form: Callable[[PartWriter], CallBody] = CallList if text[i] in "[{" else _NamedCall
            self._body = form(self._writer)
        return self._body.feed(text, i)

    def finish(self) -> None:
        if self._body is not None:
            self._body.finish()


MISTRAL = Markup(opener=OPENER, body=MistralBody)


def mistral_parser(new_id: NewId = mistral_call_id) -> MarkedParser:
    return MarkedParser(MISTRAL, new_id)

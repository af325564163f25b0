"""CallReader: one `{"name": ..., "arguments": {...}}` object, read as it arrives.

The call starts as soon as its name is known and its arguments open, and the arguments flow from
there. Keys may come in any order (`parameters` is the same as `arguments`, others are ignored), so
arguments before the name wait for it. Until the call starts every character is kept: if this turns
out not to be a call, `leftover` is what was read. Several calls in a row are `call_list.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from quire.text.tools.json_scan import SPACE, JsonScan, skip_space
from quire.text.tools.parser import is_call_name
from quire.text.tools.writer import PartWriter

ARGUMENT_KEYS = ("arguments", "parameters")


class CallReader:
    """Writes one call; feed it from the opening brace on."""

    def __init__(self, writer: PartWriter, may_lack_arguments: bool) -> None:
        self.is_over = False
        self.is_broken = False
        self.has_call = False
        self._writer = writer
        self._may_lack_arguments = may_lack_arguments
        self._step: Callable[[CallReader, str, int], int] = CallReader._open
        self._scan = JsonScan()
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # complete, waiting for the name
        self._is_flowing = False  # inside arguments that are written as they come
        self._kept: list[str] = []  # read, but so far part of no call
        self._keep_from = 0  # where in the current piece that goes on

    def feed(self, text: str, start: int) -> int:
        """Read from `start`; the index of the first character that is not the object's."""
        i, end = start, len(text)
        self._keep_from = start
        while i < end and not self.is_over:
            i = self._step(self, text, i)
        if not self._is_flowing:
            self._kept.append(text[self._keep_from : i])
        return i

    def finish(self) -> None:
        """The output ends here."""
        if self._is_flowing:
            self._writer.cut(self._scan.closing)

    @property
    def leftover(self) -> str:
        """What was read and belongs to no call."""
        return "".join(self._kept)

    # ------------------------------------------------------------ the object

    def _open(self, text: str, i: int) -> int:
        self._step = CallReader._before_key
        return i + 1

    def _before_key(self, text: str, i: int) -> int:
        if text[i] in SPACE:
            return skip_space(text, i)
        if text[i] == "}" and not self._key:
            return self._close(i)
        if text[i] != '"':
            return self._break(i)
        self._scan, self._step = JsonScan(), CallReader._in_key
        return i

    def _in_key(self, text: str, i: int) -> int:
        i = self._scan.feed(text, i)
        if self._scan.is_done:
            self._key = _string_in(self._scan.take())
            self._step = CallReader._before_colon
        return i

    def _before_colon(self, text: str, i: int) -> int:
        if text[i] in SPACE:
            return skip_space(text, i)
        if text[i] != ":":
            return self._break(i)
        self._step = CallReader._before_value
        return i + 1

    def _before_value(self, text: str, i: int) -> int:
        if text[i] in SPACE:
            return skip_space(text, i)
        self._scan, self._step = JsonScan(), CallReader._in_value
        if self._awaits_arguments and self._name is not None and text[i] == "{":
            self._start_call(self._name, i)
            self._is_flowing, self._step = True, CallReader._in_arguments
        return i

    def _in_value(self, text: str, i: int) -> int:
        i = self._scan.feed(text, i)
        if self._scan.is_done:
            self._step = CallReader._after_value
            if not self._use_value(self._scan.take(), i):
                return self._break(i)
        elif self._scan.is_broken:
            return self._break(i)
        return i

    def _in_arguments(self, text: str, i: int) -> int:
        i = self._scan.feed(text, i)
        self._writer.arguments(self._scan.take())
        if self._scan.is_done or self._scan.is_broken:
            self._is_flowing, self._keep_from = False, i
        if self._scan.is_done:
            self._step = CallReader._after_value
        elif self._scan.is_broken:
            self._writer.break_off(self._scan.closing)
            self._kept.append(self._scan.held)
            return self._break(i)
        return i

    def _after_value(self, text: str, i: int) -> int:
        if text[i] in SPACE:
            return skip_space(text, i)
        if text[i] == ",":
            self._step = CallReader._before_key
            return i + 1
        return self._close(i) if text[i] == "}" else self._break(i)

    # ------------------------------------------------------------ the call

    @property
    def _awaits_arguments(self) -> bool:
        return self._key in ARGUMENT_KEYS and not self.has_call and self._arguments is None

    def _use_value(self, value: str, i: int) -> bool:
        """Take in a complete value that ends at i; False if no call can have it."""
        if self._key == "name" and self._name is None:
            name = _string_in(value) if value.startswith('"') else ""
            if not is_call_name(name):
                return False
            self._name = name
        elif self._awaits_arguments:
            self._arguments = _as_object(value)
            if self._arguments is None:
                return False
        if self._name is not None and self._arguments is not None and not self.has_call:
            self._start_call(self._name, i)
            self._writer.arguments(self._arguments)
        return True

    def _close(self, i: int) -> int:
        if not self.has_call:
            if self._name is None or not self._may_lack_arguments:
                return self._break(i)
            self._start_call(self._name, i)
            self._writer.arguments("{}")
        self.is_over = True
        self._drop_kept(i + 1)
        return i + 1

    def _start_call(self, name: str, i: int) -> None:
        self._writer.start(name)
        self.has_call = True
        self._drop_kept(i)

    def _drop_kept(self, i: int) -> None:
        """What was read before i has become part of a call."""
        self._kept.clear()
        self._keep_from = i

    def _break(self, i: int) -> int:
        self.is_over = self.is_broken = True
        return i


def _as_object(value: str) -> str | None:
    """Arguments as the text of an object; None if they are anything else."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    if not value.startswith('"'):
        return None
    inner = _string_in(value).strip()  # some models write the object's text as a string
    scan = JsonScan()
    end = scan.feed(inner, 0)
    is_whole = inner.startswith("{") and scan.is_done and end == len(inner)
    return scan.take() if is_whole and _is_valid_text(inner) else None


def _string_in(literal: str) -> str:
    return str(json.loads(literal)) if "\\" in literal else literal[1:-1]


def _is_valid_text(text: str) -> bool:
    """Whether no escape made half a character, which cannot be encoded."""
    return not any("\ud800" <= char <= "\udfff" for char in text)

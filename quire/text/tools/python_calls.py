"""Reads `[f(a=1), g(b="x")]` as calls: keyword arguments that are plain literals, nothing else.

A hand-written reader of strings, numbers, `True`, `False`, `None`, lists, tuples and dicts; no
Python is compiled, so there is nothing that could run, recurse far or warn. Whatever else stands
there makes the whole list text. `pythonic.py` finds the list in the output.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from quire.text.messages import Json
from quire.text.tools.json_scan import MAX_DEPTH, MAX_SCALAR_CHARS, is_scalar
from quire.text.tools.parser import is_call_name

_WORDS: dict[str, Json] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"[": "]", "(": ")"}


class PythonCall(NamedTuple):
    name: str
    arguments: str  # JSON text


class NotACall(ValueError):
    """The text is something other than a list of calls with literal arguments."""


def read_calls(source: str) -> list[PythonCall]:
    """Raises NotACall."""
    return _Reader(source).calls()


class _Reader:
    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0

    def calls(self) -> list[PythonCall]:
        self._expect("[")
        calls = [self._call()]
        while self._comma_before("]"):
            calls.append(self._call())
        if self._at != len(self._source):
            raise NotACall
        return calls

    def _call(self) -> PythonCall:
        name = self._word()
        if not is_call_name(name):
            raise NotACall
        self._expect("(")
        arguments: dict[str, Json] = {}
        if self._accept(")"):
            return PythonCall(name, "{}")
        while True:
            key = self._word()
            self._expect("=")
            if not key or key in arguments:
                raise NotACall
            arguments[key] = self._value(0)
            if not self._comma_before(")"):
                break
        try:
            return PythonCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        except ValueError:  # a number too large to be one
            raise NotACall from None

    # ------------------------------------------------------------ literals

    def _value(self, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise NotACall
        char = self._peek()
        if char in ("'", '"'):
            return self._string(char)
        if char in _CLOSERS:
            return self._items(_CLOSERS[char], depth + 1)
        if char == "{":
            return self._dict(depth + 1)
        word = self._word()
        if word in _WORDS:
            return _WORDS[word]
        if len(word) > MAX_SCALAR_CHARS or not is_scalar(word):
            raise NotACall
        number: Json = json.loads(word)
        return number

    def _items(self, closer: str, depth: int) -> list[Json]:
        self._at += 1
        items: list[Json] = []
        if self._accept(closer):
            return items
        items.append(self._value(depth))
        while self._comma_before(closer):
            items.append(self._value(depth))
        return items

    def _dict(self, depth: int) -> dict[str, Json]:
        self._at += 1
        items: dict[str, Json] = {}
        if self._accept("}"):
            return items
        while True:
            quote = self._peek()
            if quote not in ("'", '"'):
                raise NotACall
            key = self._string(quote)
            self._expect(":")
            items[key] = self._value(depth)
            if not self._comma_before("}"):
                return items

    def _string(self, quote: str) -> str:
        source, start = self._source, self._at + 1
        pieces: list[str] = []
        i = start
        while source[i : i + 1] != quote:
            if i >= len(source):
                raise NotACall
            if source[i] == "\\":
                pieces.append(source[start:i])
                i = self._escape(i + 1, pieces)
                start = i
            else:
                i += 1
        pieces.append(source[start:i])
        self._at = i + 1
        return "".join(pieces)

    def _escape(self, i: int, pieces: list[str]) -> int:
        char = self._source[i : i + 1]
        digits = self._source[i + 1 : i + 1 + _HEX_ESCAPES.get(char, 0)]
        if not digits:
            known = char in ("\\", "'", '"')
            pieces.append(char if known else _ESCAPES.get(char, "\\" + char))  # as Python does
            return i + 1
        code = int(digits, 16) if _HEX.issuperset(digits) else -1
        if len(digits) != _HEX_ESCAPES[char] or not _is_character(code):
            raise NotACall
        pieces.append(chr(code))
        return i + 1 + len(digits)

    # ------------------------------------------------------------ characters

    def _peek(self) -> str:
        """The next character that is not space; "" at the end."""
        source, i = self._source, self._at
        while i < len(source) and source[i].isspace():
            i += 1
        self._at = i
        return source[i : i + 1]

    def _accept(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _expect(self, char: str) -> None:
        if not self._accept(char):
            raise NotACall

    def _comma_before(self, closer: str) -> bool:
        """Whether another item follows; a comma may also stand before the closer."""
        has_comma = self._accept(",")
        if self._accept(closer):
            return False
        if not has_comma:
            raise NotACall
        return True

    def _word(self) -> str:
        """A name, keyword or number: letters, digits and what numbers and dotted names need."""
        self._peek()
        source, start = self._source, self._at
        i = start
        while i < len(source) and (source[i].isalnum() or source[i] in "_.+-"):
            i += 1
        self._at = i
        return source[start:i]


def _is_character(code: int) -> bool:
    return 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF

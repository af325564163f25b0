"""JsonScan: checks one JSON value as it arrives and hands on what is sound so far.

`take()` gives text that some ending makes valid JSON, and `closing` is the shortest such ending;
a number, a word or a comma waits in `held` until what follows proves it. Models often write line
breaks and stray backslashes into strings: those are escaped on the way, so a string cannot break a
value. Everything else is strict. Constant work per character, no recursion; nothing is built but
text. What the value means is `call_reader.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_DEPTH = 64
MAX_SCALAR_CHARS = 128  # Python's own reader of integers stops at 4,300 digits

SPACE = frozenset(" \t\n\r")
_ESCAPES = {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_CONTROL = {chr(code): _ESCAPES.get(chr(code), f"\\u{code:04x}") for code in range(32)}
_ENDS_RUN = frozenset('"\\') | frozenset(_CONTROL)
_SCALAR_CHARS = frozenset("+-.0123456789Eaeflnrstu")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_SHORT_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")

# What may come next, between strings.
_START, _FIRST_ITEM, _ITEM, _NEXT_ITEM = "start", "first item", "item", "next item"
_FIRST_KEY, _KEY, _COLON, _VALUE, _NEXT_KEY = "first key", "key", "colon", "value", "next key"
_KEYS = frozenset((_FIRST_KEY, _KEY))
_VALUES = frozenset((_START, _FIRST_ITEM, _ITEM, _VALUE))
_END = "end"
_AFTER_ITEM = {"]": _NEXT_ITEM, "}": _NEXT_KEY}
_AFTER_COMMA = {_NEXT_ITEM: _ITEM, _NEXT_KEY: _KEY}
_CLOSERS = {"{": "}", "[": "]"}
_MAY_CLOSE = {"}": (_FIRST_KEY, _NEXT_KEY), "]": (_FIRST_ITEM, _NEXT_ITEM)}
_LACKS = {_START: "null", _VALUE: "null", _COLON: ": null"}


def skip_space(text: str, start: int) -> int:
    """The index of the first character that is not JSON's whitespace."""
    i, end = start, len(text)
    while i < end and text[i] in SPACE:
        i += 1
    return i


def is_scalar(token: str) -> bool:
    if len(token) > MAX_SCALAR_CHARS:
        return False
    if token.isascii() and token.isdigit():
        return token[0] != "0" or len(token) == 1
    return token in ("true", "false", "null") or _NUMBER.fullmatch(token) is not None


class JsonScan:
    """
    >>> scan = JsonScan()
    >>> scan.feed('{"a": [1, 2', 0), scan.take(), scan.held, scan.closing
    (11, '{"a": [1', ', 2', ']}')
    """

    # What a scan begins with; many are made, and most read a few characters.
    is_done = False
    is_broken = False
    _expects = _START
    _in_string = False
    _is_key = False
    _num_hex = 0  # digits of a unicode escape under way
    _token = ""  # a scalar under way
    _from = 0  # where in this piece the text begins that was not put away yet
    _sound_to = -1  # where in this piece the text stops being sound; -1: nowhere

    def __init__(self) -> None:
        self._step: Callable[[JsonScan, str, int], int] = JsonScan._between
        self._owed: list[str] = []  # closing brackets
        self._sound: list[str] = []
        self._waiting: list[str] = []  # read in earlier pieces, not sound yet

    def feed(self, text: str, start: int) -> int:
        """Read from `start`; the index of the first character that is not part of the value."""
        i, end = start, len(text)
        self._from = start
        self._sound_to = start if self._waiting else -1
        while i < end and not (self.is_done or self.is_broken):
            i = self._step(self, text, i)
        if self._sound_to < 0:
            self._sound.append(text[self._from : i])
        else:
            self._sound.append(text[self._from : self._sound_to])
            self._waiting.append(text[self._sound_to : i])
        return i

    def take(self) -> str:
        """The sound text since the last time."""
        sound = "".join(self._sound)
        self._sound.clear()
        return sound

    @property
    def held(self) -> str:
        """What was read but is not sound yet."""
        return "".join(self._waiting)

    @property
    def closing(self) -> str:
        """What makes valid JSON of everything taken, as long as the value is not done."""
        if self._in_string:
            lacks = '": null' if self._is_key else '"'
        else:
            lacks = _LACKS.get(self._expects, "")
        return lacks + "".join(reversed(self._owed))

    # ------------------------------------------------------------ between strings

    def _between(self, text: str, i: int) -> int:
        """Up to the next string, bracket or colon. The inner loop: it keeps to local names."""
        end, expects = len(text), self._expects
        after_value = _AFTER_ITEM[self._owed[-1]] if self._owed else _END
        while i < end:
            char = text[i]
            if char in _SCALAR_CHARS and expects in _VALUES:
                start = i
                while i < end and text[i] in _SCALAR_CHARS:
                    i += 1
                if i == end or after_value is _END or not is_scalar(text[start:i]):
                    self._expects = expects
                    return self._scalar(text, start)
                self._settle()
                expects = after_value
            elif char == "," and expects in _AFTER_COMMA:
                expects = _AFTER_COMMA[expects]
                self._sound_to = i
                i += 1
            elif char in SPACE:
                i += 1
            else:
                self._expects = expects
                return self._punctuation(char, i)
        self._expects = expects
        return i

    def _scalar(self, text: str, i: int) -> int:
        """A scalar that the next piece may go on with, or that ends the value, or is none."""
        start, end = i, min(len(text), i + MAX_SCALAR_CHARS + 1 - len(self._token))
        if self._sound_to < 0:
            self._sound_to = start
        while i < end and text[i] in _SCALAR_CHARS:
            i += 1
        token = self._token + text[start:i]
        if len(token) > MAX_SCALAR_CHARS or (i < len(text) and not is_scalar(token)):
            self.is_broken = True
        elif i < len(text):
            self._token = ""
            self._settle()
            self._end_value()
        else:
            self._token, self._step = token, JsonScan._scalar
        return i

    def _punctuation(self, char: str, i: int) -> int:
        expects = self._expects
        if char == '"' and (expects in _VALUES or expects in _KEYS):
            self._settle()
            self._in_string, self._is_key = True, expects in _KEYS
            self._step = JsonScan._string
        elif char in _CLOSERS and expects in _VALUES and len(self._owed) < MAX_DEPTH:
            self._settle()
            self._owed.append(_CLOSERS[char])
            self._expects = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif expects in _MAY_CLOSE.get(char, ()):
            self._owed.pop()
            self._end_value()
        elif char == ":" and expects == _COLON:
            self._expects = _VALUE
        else:
            self.is_broken = True
            return i
        return i + 1

    def _end_value(self) -> None:
        self._step = JsonScan._between
        self._expects = _AFTER_ITEM[self._owed[-1]] if self._owed else _END
        self.is_done = self._expects is _END

    def _settle(self) -> None:
        """What comes now proves all that waited."""
        self._sound_to = -1
        if self._waiting:
            self._sound += self._waiting
            self._waiting.clear()

    # ------------------------------------------------------------ inside strings

    def _string(self, text: str, i: int) -> int:
        end = len(text)
        while i < end:
            char = text[i]
            if char not in _ENDS_RUN:
                i += 1
            elif char == '"':
                return self._end_string(i)
            elif char != "\\":
                self._sound += (text[self._from : i], _CONTROL[char])
                i += 1
                self._from = i
            elif text[i + 1 : i + 2] in _SHORT_ESCAPES:
                i += 2
            else:
                self._sound_to, self._step = i, JsonScan._escape
                return i + 1
        return i

    def _end_string(self, i: int) -> int:
        self._in_string = False
        if self._is_key:
            self._expects, self._step = _COLON, JsonScan._between
        else:
            self._end_value()
        return i + 1

    def _escape(self, text: str, i: int) -> int:
        if text[i] == "u":
            digits = text[i + 1 : i + 5]
            if len(digits) == 4:
                is_sound = _HEX.issuperset(digits)
                return self._end_escape(text, i + 4 if is_sound else i, is_sound)
            self._num_hex, self._step = 0, JsonScan._unicode_escape
            return i + 1
        return self._end_escape(text, i, is_sound=text[i] in _SHORT_ESCAPES)

    def _unicode_escape(self, text: str, i: int) -> int:
        self._num_hex += 1
        if text[i] in _HEX and self._num_hex < 4:
            return i + 1
        return self._end_escape(text, i, is_sound=text[i] in _HEX)

    def _end_escape(self, text: str, i: int, is_sound: bool) -> int:
        self._step = JsonScan._string
        if not is_sound:
            # The backslash is meant as it stands: doubled, and what follows it is plain text.
            self._sound += (text[self._from : self._sound_to], "\\")
            self._from = self._sound_to
        self._settle()
        return i + 1 if is_sound else i

"""Marker: finds a fixed string, such as `<tool_call>`, in text that arrives in pieces.

Text that only might begin the marker is held back; how much is one number, since it equals the
marker's own beginning. A marker's first character must not occur in it again: then a failed match
can restart at the character that broke it, and no text is looked at twice. For stop strings, which
can be anything, see `text/stops.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class Seek(NamedTuple):
    plain: str  # text that is certainly no part of the marker
    end: int  # where reading goes on
    is_found: bool


class Marker:
    """
    >>> marker = Marker("<tool>")
    >>> marker.seek("a <to", 0), marker.seek("ol> b", 0)
    (Seek(plain='a ', end=5, is_found=False), Seek(plain='', end=3, is_found=True))
    """

    def __init__(self, text: str) -> None:
        assert text and text[0] not in text[1:], f"cannot search for {text!r} this way"
        self.text = text
        self._held = 0  # characters of the marker at the end of the text so far

    def is_absent(self, text: str, start: int) -> bool:
        """Whether this is plain text to its end, as most is: the quick way past `seek`."""
        return not self._held and text.find(self.text[0], start) < 0

    def seek(self, text: str, start: int) -> Seek:
        """Read on, up to just past the marker or to the end of this piece."""
        plain = ""
        if self._held and start < len(text):
            end = self._resume(text, start)
            if end > 0:
                return Seek("", end, self._held == 0)
            plain, self._held = self.text[: self._held], 0
        found = text.find(self.text, start)
        if found >= 0:
            return Seek(plain + text[start:found], found + len(self.text), True)
        tail = text.rfind(self.text[0], max(start, len(text) - len(self.text) + 1))
        if tail >= 0 and self.text.startswith(text[tail:]):
            self._held = len(text) - tail
        return Seek(plain + text[start : len(text) - self._held], len(text), False)

    def flush(self) -> str:
        """What was held back; call when the text ends."""
        held, self._held = self.text[: self._held], 0
        return held

    def _resume(self, text: str, start: int) -> int:
        """Go on with a marker begun in an earlier piece; where that ends, 0 if it does not fit."""
        rest = self.text[self._held : self._held + len(text) - start]
        if not text.startswith(rest, start):
            return 0
        self._held = (self._held + len(rest)) % len(self.text)
        return start + len(rest)

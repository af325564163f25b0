"""StopMatcher: finds stop strings in text that arrives in pieces.

Text is released as soon as it cannot be part of a stop: only the longest suffix that begins one is
held back. The stop that is complete first wins (the longest of those ending together), so how the
text was cut into pieces never changes the result. One Knuth-Morris-Pratt state per stop makes it
linear in the text, whatever the stops are. Token-id stops are the scheduler's; see `sched/`.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed it deltas; it returns what may be shown and the stop that was hit, if any.

    >>> matcher = StopMatcher(["\\n\\n"])
    >>> matcher.push("one\\n"), matcher.push("\\ntwo")
    (('one', None), ('', '\\n\\n'))
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        assert all(stops), f"empty stop string in {stops!r}"
        self._scans = [_Scan(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def push(self, delta: str) -> tuple[str, str | None]:
        """Text to show now, and the stop hit. After a hit nothing more is shown."""
        if self._matched is not None:
            return "", self._matched
        if not self._scans:
            return delta, None
        end = len(delta)
        for scan in self._scans:
            hit = scan.advance(delta[:end])
            if hit is None or (self._matched is not None and hit == end and self._beats(scan)):
                continue
            end, self._matched = hit, scan.stop
        text = self._held + delta[:end]
        if self._matched is not None:
            self._held = ""
            return text if self._include_stop else text[: -len(self._matched)], self._matched
        keep = len(text) - max(scan.length for scan in self._scans)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was still held back; call when the text ends without a stop."""
        held, self._held = self._held, ""
        for scan in self._scans:
            scan.length = 0
        return held

    def _beats(self, scan: _Scan) -> bool:
        return self._matched is not None and len(self._matched) >= len(scan.stop)


class _Scan:
    """The state of one stop: how many of its characters the text so far ends with."""

    __slots__ = ("_borders", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._borders = _borders(stop)

    def advance(self, text: str) -> int | None:
        """Take in text; the index just past the first complete stop, or None."""
        stop, borders, length = self.stop, self._borders, self.length
        i = 0
        while i < len(text):
            if length == 0:
                # Most text has no first character of a stop: let str.find skip it.
                i = text.find(stop[0], i)
                if i < 0:
                    break
            while length and text[i] != stop[length]:
                length = borders[length - 1]
            if text[i] == stop[length]:
                length += 1
            i += 1
            if length == len(stop):
                self.length = 0
                return i
        self.length = length
        return None


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders

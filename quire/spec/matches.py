"""Matches: the places of a text where its newest tokens stood before, and how many of them.

A place is where the next token would be. Adding a token looks at no more than `MOST` places: those
that go on, then the newest where the token stands, so a token that is everywhere costs no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

MOST = 32  # places that are followed at once
AHEAD = 4  # of those that are new, so many behind a given place come first


class Matches:
    """
    >>> text = Matches([7, 8, 9, 7, 8])
    >>> text.lengths  # before the 9 stands what stands at the end
    {2: 2}
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self.lengths: dict[int, int] = {}  # place -> tokens before it that are the newest, too
        self._ends: dict[int, list[int]] = {}  # token -> places behind it, ascending
        for token in tokens:
            self.add(token)

    def load(self, tokens: Iterable[int]) -> None:
        """Text that nobody asks about until it is followed by another."""
        for place, token in enumerate(tokens, len(self.text) + 1):
            self.text.append(token)
            self._ends.setdefault(token, []).append(place)
        self.lengths = {}

    def has(self, token: int) -> bool:
        return token in self._ends

    def add(self, token: int, near: int = 0) -> None:
        """One more; of new places those behind `near` come first."""
        text, ends = self.text, self._ends.get(token)
        if ends is None:  # as most are where nothing is written again
            text.append(token)
            self._ends[token] = [len(text)]
            self.lengths = {}
            return
        found = {p + 1: n + 1 for p, n in self.lengths.items() if text[p] == token}
        for place in list(found)[MOST - AHEAD :]:  # those that began last
            del found[place]
        if len(ends) > MOST and near:
            first = bisect_right(ends, near)
            for place in ends[first : first + AHEAD]:
                found.setdefault(place, 1)
        for place in reversed(ends[-MOST:]):
            if len(found) >= MOST:
                break
            found.setdefault(place, 1)
        text.append(token)
        ends.append(len(text))
        self.lengths = found

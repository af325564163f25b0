"""Followed: a text that goes on as it or another text went before, and the place there.

The place moves along with the tokens. Where one differs, the place is found again by the newest
tokens: the longest match wins, and one a little behind the lost place counts as longer than one
elsewhere. What was passed over on both sides in between is taken for a replacement (`replaced.py`),
and is written again where the old text comes again.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.spec.matches import Matches
from quire.spec.proposer import NOTHING, Guess
from quire.spec.replaced import Replaced

REACH = 24  # tokens behind a lost place that are near it
NEAR = 2  # matching tokens that being near is worth
BEGUN = 6  # matching tokens that the beginning of a hint is worth
SETTLED = 3  # matching tokens behind a replacement that make it one
DOUBTED = 0.12  # chance that one other token replaced one
NEWEST = 32  # tokens before the first that is guessed that are matched
END = -1  # between two texts: no token
NOWHERE = (-1, -1)


def trust(length: int) -> float:
    """How likely a text goes on as it did behind so many tokens in a row, from 1 on."""
    return 1.0 - 1.4 / (length + 1)


class Followed:
    def __init__(self, hint: Sequence[int], before: Sequence[int]) -> None:
        """A hint at what is to come, and the tokens before that."""
        self._matches = Matches()
        self._text = self._matches.text
        self._replaced = Replaced()
        self._at: int | None = 0 if hint else None  # the next token, in the text
        self._run = BEGUN  # tokens in a row that were as followed
        self._due: tuple[int, ...] = ()  # of a replacement begun, before that
        # Where the text was left, and its length then: of a replacement begun, and of a place lost.
        self._begun = self._lost = NOWHERE
        self._size = len(hint)
        self._matches.load((*hint, END))
        self._matches.load(before[:-NEWEST])
        for token in before[-NEWEST:]:
            self._matches.add(token)
        if not hint:
            self._switch(0)

    # ------------------------------------------------------------ what comes

    def move(self, token: int) -> None:
        text, expected = self._text, self._next()
        self._matches.add(token, self._near[0])
        if self._at is not None and token == expected:
            self._advance()
            self._run += 1
            self._switch(self._run + NEAR)
        elif self._at is not None and not self._due and token == text[self._at]:
            self._replaced.forget(text, self._at)
            self._at, self._run = self._at + 1, self._run + 1
        else:
            self._lose()
        if self._lost != NOWHERE and self._run >= SETTLED:
            self._settle()

    @property
    def _near(self) -> tuple[int, int]:
        """Places close to where the text is or was followed: behind the first, up to the second."""
        if self._lost != NOWHERE:
            place, since = self._lost
            return place, place + REACH + (len(self._text) - since)
        return (self._at, self._at + REACH) if self._at is not None else (0, 0)

    def _lose(self) -> None:
        at, was_doubted = self._at, self._run == 0
        if self._lost == NOWHERE and at is not None:
            self._lost = self._begun if self._due else (at, len(self._text) - 1)
        self._at, self._due, self._run = None, (), 0
        if not self._switch(0) and at is not None and at < self._size and not was_doubted:
            self._at = at + 1  # perhaps another word in the same place

    def _switch(self, least: int) -> bool:
        """To the place of the longest match, if it is longer than that."""
        best, (near, far) = (float(least), 0, 0), self._near
        size = len(self._text)
        for place, length in self._matches.lengths.items():
            if place >= size or self._text[place] == END:
                continue
            is_near = near < place <= far
            rank = length + NEAR * is_near, near - place if is_near else -size, place
            if rank > best and rank[0] > least:
                best = rank
        place = best[2]
        if not place or place == self._at:
            return False
        self._at, self._due, self._run = place, (), self._matches.lengths[place]
        if not near < place <= far:
            self._lost = NOWHERE
        return True

    def _settle(self) -> None:
        """The text goes on behind a place that was lost: what lies between was replaced."""
        (start, since), (_, far), at = self._lost, self._near, self._at
        self._lost = NOWHERE
        if at is None or not start < at <= far:
            return
        end = len(self._text)
        both = min(self._run, at - start, end - since)
        self._replaced.learn(self._text, start, at - both, self._text[since : end - both])

    # ------------------------------------------------------------ what is guessed

    def guess(self, most: int) -> Guess:
        at, due = self._at, self._due
        tokens: list[int] = []
        while at is not None and len(tokens) < most:
            token, at, due = self._after(at, due, tokens)
            if token == END:
                break
            tokens.append(token)
        if not tokens:
            return NOTHING
        run = self._run
        chances = (DOUBTED if run + i == 0 else trust(run + i) for i in range(len(tokens)))
        return Guess(tuple(chances), tuple(tokens))

    def _next(self) -> int:
        return END if self._at is None else self._after(self._at, self._due, ())[0]

    def _advance(self) -> None:
        assert self._at is not None
        at, was_due = self._at, self._due
        _, self._at, self._due = self._after(at, was_due, ())
        if self._due and not was_due:
            self._begun = at, len(self._text) - 1

    def _after(
        self, at: int, due: tuple[int, ...], tokens: Sequence[int]
    ) -> tuple[int, int, tuple[int, ...]]:
        """(the token at a place, the place and what is due behind it); `tokens` follow the text."""
        text = self._text
        if due:
            return due[0], at, due[1:]
        while (found := self._replaced.at(text, at)) is not None:
            count, new = found
            if not count:
                return new[0], at + 1, (*new[1:], text[at])
            at += count
            if new:
                return new[0], at, new[1:]
        if at < len(text):
            return text[at], at + 1, ()
        beyond = at - len(text)
        return (tokens[beyond] if beyond < len(tokens) else END), at + 1, ()

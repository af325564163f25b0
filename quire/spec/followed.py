"""Followed: a text that goes on as it or another text went before, and the place there.

The place moves along with the tokens. Where one differs, the place is found again by the newest
tokens: the longest match wins, and one a little behind the lost place counts as longer than one
elsewhere. What was passed over on both sides in between is taken for a replacement (`replaced.py`),
and is written again where the old text comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.spec.matches import Matches
from quire.spec.proposer import NOTHING, Guess
from quire.spec.replaced import Replaced, Run

REACH = 24  # tokens behind a lost place that are near it
NEAR = 2  # matching tokens that being near is worth
BEGUN = 6  # matching tokens that the beginning of a hint is worth
SETTLED = 3  # matching tokens behind a replacement that make it one
# Chances that one other token replaced one, at first and where that was seen; of a replacement that
# was not right before.
DOUBTED, EVEN, UNPROVEN = 0.12, 0.45, 0.5
PATIENCE = 64  # tokens from elsewhere after which a lost place of the given text is given up
SKIPPED = 4  # spans in a row that are left out
NEWEST = 32  # tokens before the first that is guessed that are matched
END = -1  # between two texts: no token
NOWHERE = (-1, -1)


def trust(length: int) -> float:
    """How likely a text goes on as it did behind so many tokens in a row, from 1 on."""
    return 1.0 - 1.4 / (length + 1)


TRUSTS = tuple(map(trust, range(1 << 10)))


class Step(NamedTuple):
    token: int
    at: int  # the place behind it
    due: Run = ()  # what comes before that
    is_new: bool = False  # it replaces what stands at the place
    is_proven: bool = True


NO_STEP = Step(END, 0)


class Followed:
    def __init__(self, hint: Sequence[int], before: Sequence[int]) -> None:
        """A hint at what is to come, and the tokens before that."""
        self._matches = Matches()
        self._text = self._matches.text
        self._replaced = Replaced()
        self._at: int | None = 0 if hint else None  # the next token, in the text
        self.run = BEGUN  # tokens in a row that were as followed
        self._due: Run = ()  # of a replacement begun, before that
        # Where the text was left, and its length then: of a replacement begun, and of a place lost.
        self._begun = self._lost = NOWHERE
        self._matches.load((*hint, END))
        self._matches.load(before[:-NEWEST])
        for token in before[-NEWEST:]:
            self._matches.add(token)
        self._size = len(self._text)  # of what was given, which the answer may be written from
        if not hint:
            self._switch(0)

    # ------------------------------------------------------------ what comes

    def move(self, token: int) -> None:
        text, at = self._text, self._at
        if at is None and not self._matches.has(token):
            self._matches.add(token)
            self.run = 0  # still lost, and nothing to find the place by
            return
        step = NO_STEP if at is None else self._after(at, self._due, ())
        self._matches.add(token, self._near[0])
        if at is not None and token == step.token:
            if step.is_new:
                self._replaced.judge(text, at, is_right=True)
                self._begun = at, len(text) - 1
            self._at, self._due = step.at, step.due
            self.run += 1
            if max(self._matches.lengths.values(), default=0) > self.run:
                self._switch(self.run + NEAR)
        elif at is not None and step.is_new and token == text[at]:
            self._replaced.judge(text, at, is_right=False)
            self._at, self.run = at + 1, self.run + 1
        else:
            self._lose()
        if self._lost != NOWHERE and self.run >= SETTLED:
            self._settle()

    @property
    def _near(self) -> tuple[int, int]:
        """Places close to where the text is or was followed: behind the first, up to the second."""
        if self._lost != NOWHERE:
            place, since = self._lost
            return place, place + REACH + (len(self._text) - since)
        return (self._at, self._at + REACH) if self._at is not None else (0, 0)

    def _lose(self) -> None:
        at, was_doubted = self._at, self.run == 0
        left = self._begun if self._due else (NOWHERE if at is None else (at, len(self._text) - 1))
        self._at, self._due, self.run = None, (), 0
        is_given = 0 <= left[0] < self._size
        if self._lost == NOWHERE and is_given:
            self._lost = left
        can_doubt = is_given and not was_doubted
        if not self._switch(1 if can_doubt and self._replaced.is_even else 0) and can_doubt:
            self._at = left[0] + 1  # perhaps another word in the same place

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
        self._at, self._due, self.run = place, (), self._matches.lengths[place]
        return True

    def _settle(self) -> None:
        """Behind a place of the given text that was lost: what lies between was replaced."""
        (start, since), (_, far), at = self._lost, self._near, self._at
        end = len(self._text)
        is_elsewhere = at is None or at >= self._size
        if is_elsewhere and end - since < PATIENCE:
            return
        self._lost = NOWHERE
        if at is not None and start < at <= min(far, self._size):
            both = min(self.run, at - start, end - since)
            self._replaced.learn(self._text, start, at - both, self._text[since : end - both])

    # ------------------------------------------------------------ what is guessed

    def guess(self, most: int) -> Guess:
        at, due = self._at, self._due
        if at is None:
            return NOTHING
        is_plain = not due and self._replaced.is_silent(self._text, at, at + most)
        if is_plain and self.run + most < len(TRUSTS):
            return self._copied(at, most)
        tokens: list[int] = []
        chances: list[float] = []
        while at is not None and len(tokens) < most:
            step = self._after(at, due, tokens)
            if step.token == END:
                break
            run = self.run + len(tokens)
            chance = trust(run) if run else EVEN if self._replaced.is_even else DOUBTED
            chances.append(chance * UNPROVEN if step.is_new and not step.is_proven else chance)
            tokens.append(step.token)
            at, due = step.at, step.due
        return Guess(tuple(chances), tuple(tokens)) if tokens else NOTHING

    def _copied(self, at: int, most: int) -> Guess:
        """The same where nothing is replaced: what stands there, and what is guessed
        once more where the text ends."""
        tokens = self._text[at : at + most]
        if END in tokens:
            del tokens[tokens.index(END) :]
        elif tokens:
            beyond = len(tokens)
            tokens += (tokens * (1 + most // beyond))[: most - beyond]
        if not tokens:
            return NOTHING
        chances = TRUSTS[self.run : self.run + len(tokens)]
        if not self.run:
            chances = (EVEN if self._replaced.is_even else DOUBTED, *chances[1:])
        return Guess(chances, tuple(tokens))

    def _after(self, at: int, due: Run, tokens: Sequence[int]) -> Step:
        """The token at a place, and what follows; `tokens` follow the text."""
        text = self._text
        if due:
            return Step(due[0], at, due[1:])
        is_new = False
        for _ in range(SKIPPED):
            if (span := self._replaced.at(text, at)) is None:
                break
            if not span.num_old:
                return Step(span.new[0], at + 1, (*span.new[1:], text[at]), True, span.is_proven)
            at, is_new = at + span.num_old, True
            if span.new:
                return Step(span.new[0], at, span.new[1:], True, span.is_proven)
        if at < len(text):
            return Step(text[at], at + 1, (), is_new, True)
        beyond = at - len(text)
        return Step(tokens[beyond] if beyond < len(tokens) else END, at + 1)

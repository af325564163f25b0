"""Replaced: what stood in a text and stands otherwise in the one that is written after it.

A name that became another becomes it again. What was not replaced once is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

DROPPED = 3  # tokens that are left out, at most
LONGEST = 12  # tokens of a span that count as replaced, old and new
WHOLE = 40  # tokens between two places that agree, which are compared
ALIKE = 8  # spans with the same first token that are known, the newest
CONTEXT = 2  # tokens before it that make an insertion known again

Run = tuple[int, ...]


class Span(NamedTuple):
    num_old: int  # tokens that are replaced, 0: none, something is inserted
    new: Run
    is_proven: bool  # it was right before


class Replaced:
    """
    >>> names = Replaced()
    >>> names.learn([5, 6, 1, 2, 7], 2, 4, [9])
    >>> names.at([8, 1, 2], 1)
    Span(num_old=2, new=(9,), is_proven=False)
    """

    def __init__(self) -> None:
        # By the first token of the old span; of insertions by the tokens before them.
        self._spans: dict[int, dict[Run, Run]] = {}
        self._inserted: dict[Run, Run] = {}
        self._proven: set[tuple[Run, Run]] = set()
        self.is_even = False  # whether the newest replacement was of a token by a token

    def is_silent(self, text: Sequence[int], start: int, end: int) -> bool:
        """Whether `at` knows nothing of all these places."""
        if not self._spans.keys().isdisjoint(text[start:end]):
            return False
        first = max(start, CONTEXT)
        befores = zip(*(text[first - i : end - i] for i in range(CONTEXT, 0, -1)), strict=False)
        return not self._inserted or self._inserted.keys().isdisjoint(befores)

    def learn(self, text: Sequence[int], start: int, end: int, new: Sequence[int]) -> None:
        """text[start:end] was written as `new`."""
        old = text[start:end]
        if max(len(old), len(new)) > WHOLE:
            return
        for kind, a, b, c, d in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if kind != "equal" and max(b - a, d - c) <= (LONGEST if c < d else DROPPED):
                self._learn(text, start + a, start + b, tuple(new[c:d]))

    def _learn(self, text: Sequence[int], start: int, end: int, new: Run) -> None:
        old = tuple(text[start:end])
        self.is_even = len(old) == len(new) == 1
        if old:
            spans = self._spans.setdefault(old[0], {})
            spans.pop(old, None)
            spans[old] = new
            if len(spans) > ALIKE:
                del spans[next(iter(spans))]
        elif start >= CONTEXT:
            self._inserted[tuple(text[start - CONTEXT : start])] = new

    def at(self, text: Sequence[int], place: int) -> Span | None:
        """What is replaced here, the longest that is."""
        best: Run = ()
        spans = self._spans.get(text[place]) if self._spans and place < len(text) else None
        for old in spans or ():
            if len(old) > len(best) and tuple(text[place : place + len(old)]) == old:
                best = old
        if best and spans:
            return Span(len(best), spans[best], (best, spans[best]) in self._proven)
        if self._inserted and CONTEXT <= place < len(text):
            before = tuple(text[place - CONTEXT : place])
            if (new := self._inserted.get(before)) is not None:
                return Span(0, new, (before, new) in self._proven)
        return None

    def judge(self, text: Sequence[int], place: int, *, is_right: bool) -> None:
        """Whether what is replaced here was."""
        if (span := self.at(text, place)) is None:
            return
        old = tuple(
            text[place : place + span.num_old] if span.num_old else text[place - CONTEXT : place]
        )
        if is_right:
            self._proven.add((old, span.new))
        elif span.num_old:
            del self._spans[text[place]][old]
        else:
            del self._inserted[old]

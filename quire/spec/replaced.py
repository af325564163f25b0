"""Replaced: what stood in a text and stands otherwise in the one that is written after it.

A name that became another becomes it again. What was taken back once is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 12  # tokens of a span that count as replaced, old and new
CONTEXT = 2  # tokens before it that make an insertion known again


class Replaced:
    """
    >>> names = Replaced()
    >>> names.learn([5, 6, 1, 2, 7], 2, 4, [9])
    >>> names.at([8, 1, 2], 1)
    (2, (9,))
    """

    def __init__(self) -> None:
        # By the first token of the old span; of insertions by the tokens before them.
        self._spans: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._inserted: dict[tuple[int, ...], tuple[int, ...]] = {}

    def learn(self, text: Sequence[int], start: int, end: int, new: Sequence[int]) -> None:
        """text[start:end] was written as `new`."""
        old = tuple(text[start:end])
        if len(old) > LONGEST or len(new) > LONGEST or not (old or new):
            return
        if old:
            self._spans.setdefault(old[0], {})[old] = tuple(new)
        elif start >= CONTEXT:
            self._inserted[tuple(text[start - CONTEXT : start])] = tuple(new)

    def at(self, text: Sequence[int], place: int) -> tuple[int, tuple[int, ...]] | None:
        """(how many tokens are replaced here, by which), if any are."""
        found: tuple[int, tuple[int, ...]] | None = None
        spans = self._spans.get(text[place]) if self._spans and place < len(text) else None
        for old, new in spans.items() if spans else ():
            if (found is None or len(old) > found[0]) and _stands(text, place, old):
                found = len(old), new
        if found is None and self._inserted and place >= CONTEXT:
            inserted = self._inserted.get(tuple(text[place - CONTEXT : place]))
            found = None if inserted is None else (0, inserted)
        return found

    def forget(self, text: Sequence[int], place: int) -> None:
        """What was replaced before is not replaced here."""
        found = self.at(text, place)
        if found is None:
            return
        if found[0]:
            self._spans[text[place]].pop(tuple(text[place : place + found[0]]))
        else:
            self._inserted.pop(tuple(text[place - CONTEXT : place]))


def _stands(text: Sequence[int], place: int, run: tuple[int, ...]) -> bool:
    return tuple(text[place : place + len(run)]) == run

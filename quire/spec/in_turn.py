"""InTurn: several proposers, the first that expects enough wins, or else who expects most.

What a grammar leaves no choice about comes first, then hints, then what the text had before. A
model beside texts is not one of them (`source.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from quire.request import Request
from quire.spec.proposer import Guess, Proposer

T = TypeVar("T")

ENOUGH = 1.5  # tokens that a guess must promise by its own chances, unless nobody comes after it


def first_enough(offers: Iterable[T], expected: Callable[[T], float]) -> T:
    """The first that expects enough, or else who expects most; those behind it are not asked."""
    best: tuple[float, T] | None = None
    for offer in offers:
        found = expected(offer)
        if best is None or found > best[0]:
            best = found, offer
        if found >= ENOUGH:
            break
    assert best is not None, "nobody to ask"
    return best[1]


class InTurn:
    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, request: Request, most: int) -> Guess:
        guesses = (proposer.propose(request, most) for proposer in self._proposers)
        return first_enough(guesses, Guess.expected)

    def forget(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.forget(request)

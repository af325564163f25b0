"""InTurn: several proposers, the first that expects enough wins, or else who expects most.

A long match in a suffix automaton costs nothing and is mostly right; where there is none, a model
drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.request import Request
from quire.spec.proposer import NOTHING, Guess, Proposer

ENOUGH = 1.5  # tokens that a guess must promise by its own chances, unless nobody comes after it


class InTurn:
    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers

    def propose(self, request: Request, most: int) -> Guess:
        guess = NOTHING
        for proposer in self._proposers:
            guess = max(guess, proposer.propose(request, most), key=Guess.expected)
            if guess.expected() >= ENOUGH:
                break
        return guess

    def forget(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.forget(request)

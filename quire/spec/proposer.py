"""Proposer: the seam to whoever guesses what a request draws next.

A proposer looks at a request's tokens and returns guesses with the chance it gives each, or it says
how many a model could make (`Guess.tokens` is empty then, and the runner makes them). A guess is
never wrong in a way that matters: `verify.py` decides, and a bad guess costs time only. So
proposers know nothing of sampling, grammars or pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from quire.request import Request
from quire.spec.tree import survivals


class Guess(NamedTuple):
    """What may come next. `chances` are given that all guesses before were right."""

    chances: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()  # empty: the runner makes them
    parents: tuple[int, ...] = ()  # of a tree (`tree.py`), where `chances` are given the parent

    def expected(self) -> float:
        """Tokens that it would bring by these chances."""
        if self.parents:
            return sum(survivals(self.chances, self.parents))
        survival: Iterator[float] = accumulate(self.chances, mul)
        return sum(survival)


NOTHING = Guess()


class Proposer(Protocol):
    def propose(self, request: Request, most: int) -> Guess:
        """At most so many guesses; all of the request's tokens are known."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended; its answer may help others."""
        ...

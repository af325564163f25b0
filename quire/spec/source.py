"""Source: one proposer, what its guesses were worth so far, and in which steps it is asked.

A method of two parts has two sources, a text and a model. Each is looked at as often as its own
guesses deserve: a model that is mostly wrong does not keep a text from being asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.request import Request, RequestId
from quire.spec.looks import Looks
from quire.spec.proposer import Guess, Proposer
from quire.spec.survival import Survival


@dataclass(slots=True)
class Source:
    proposer: Proposer
    survival: Survival = field(default_factory=Survival)
    looks: dict[RequestId, Looks] = field(default_factory=dict)

    def offer(self, request: Request, most: int) -> Offer | None:
        guess = self.proposer.propose(request, most)
        if not guess.chances:
            self.looks[request.id].nothing()
            return None
        return Offer(self, guess)

    def soon(self) -> None:
        for looks in self.looks.values():
            looks.soon(1)

    def forget(self, request: Request) -> None:
        self.survival.forget(request.id)
        self.looks.pop(request.id, None)
        self.proposer.forget(request)


class Offer(NamedTuple):
    """A guess, and whose it is."""

    source: Source
    guess: Guess

    @property
    def is_known(self) -> bool:
        """Whether its tokens are known here, so that they are judged even if they are not fed."""
        return bool(self.guess.tokens) and not self.guess.parents

    def weighed(self, id: RequestId, *, pays: bool, are_few: bool) -> None:
        """What looks are to know: of few requests a guess that is known here costs next to none."""
        looks = self.source.looks[id]
        is_cheap = are_few and self.is_known
        (looks.promise if pays else looks.nothing if is_cheap else looks.miss)()

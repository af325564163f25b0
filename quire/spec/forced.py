"""Forced: tokens that a request's grammar leaves no choice about (jump-forward).

The mask would leave one token anyway; as drafts they are drawn in one step. A grammar that allows
another spelling of the same text in tokens may prove them wrong like any other draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.request import Request, RequestId
from quire.spec.proposer import NOTHING, Guess

CHANCE = 0.95


class Forced:
    def __init__(self, forced_of: Callable[[RequestId], Sequence[int]]) -> None:
        self._forced_of = forced_of

    def propose(self, request: Request, most: int) -> Guess:
        if request.params.structured_outputs is None:
            return NOTHING
        tokens = tuple(self._forced_of(request.id))[:most]
        return Guess((CHANCE,) * len(tokens), tokens)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

"""Neural: leaves the guesses to a model that the runner has (`runner/drafter.py`).

What its drafts are worth is not known before they were tried; `survival.py` counts it.
"""

from __future__ import annotations

from quire.request import Request
from quire.spec.proposer import Guess
from quire.speculative import SpecConfig

CHANCE = 0.7  # where counting begins


class Neural:
    def __init__(self, config: SpecConfig) -> None:
        pass

    def propose(self, request: Request, most: int) -> Guess:
        return Guess((CHANCE,) * most)

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

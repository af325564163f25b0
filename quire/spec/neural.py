"""Neural: leaves the guesses to a model that the runner has (`runner/drafter.py`).

What its drafts are worth is not known before they were tried; `survival.py` counts it. With a tree
(`draft_tree.py`) there are several guesses at a position, and the model makes those that are taken.
"""

from __future__ import annotations

from quire.draft_tree import CHANCES, chance_of, parents_of
from quire.request import Request
from quire.spec.proposer import Guess
from quire.speculative import SpecConfig

CHANCE = CHANCES[0]  # where counting begins


class Neural:
    def __init__(self, config: SpecConfig) -> None:
        tree = config.token_tree(config.levels) or ()
        self._parents = parents_of(tree)
        self._chances = tuple(map(chance_of, tree))

    def propose(self, request: Request, most: int) -> Guess:
        if not self._parents:
            return Guess((CHANCE,) * most)
        return Guess(self._chances[:most], parents=self._parents[:most])

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

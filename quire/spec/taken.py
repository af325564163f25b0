"""Taken: what a step feeds of a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.spec.proposer import Guess
from quire.spec.tree import chosen, is_chain, trunk_of
from quire.step import Draft


class Taken(NamedTuple):
    """What is fed of a guess, and the chances that its proposer gave that."""

    draft: Draft
    chances: tuple[float, ...]

    @staticmethod
    def all_of(guess: Guess) -> Taken:
        num = len(guess.chances)
        return Taken.of(guess, range(1, 1 + num) if guess.parents else (), num)

    @staticmethod
    def of(guess: Guess, nodes: Sequence[int], num: int) -> Taken:
        """The first `num` guesses, or these nodes of a tree."""
        if not nodes:
            return Taken(Draft(num, guess.tokens[:num]), guess.chances[:num])
        # What follows the first guesses lies where a chain would have it: if it is right, as it
        # mostly is, nothing moves.
        trunk = trunk_of(guess.parents)
        nodes = sorted(nodes, key=lambda node: node not in trunk)
        tokens = tuple(guess.tokens[node - 1] for node in nodes) if guess.tokens else ()
        parents = chosen(nodes, guess.parents)
        draft = Draft(num, tokens, () if is_chain(parents) else parents)
        return Taken(draft, tuple(guess.chances[node - 1] for node in nodes))

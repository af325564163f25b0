"""Two texts compared: how they are paired up, put into one prompt, or measured as embeddings.

A model with a head for it (a cross-encoder) reads both texts as one prompt; any other model embeds
each and the cosine between the two is the score. Shared by the offline API and the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.errors import BadRequest
from quire.text.tokenizer import Tokenizer


class Pairing(NamedTuple):
    """Each distinct place of the two lists, and which places make a pair."""

    first: list[str]
    second: list[str]
    pairs: list[tuple[int, int]]  # indices into them


def pair_up(first: str | Sequence[str], second: str | Sequence[str]) -> Pairing:
    """One with each, or each with its own."""
    ones = [first] if isinstance(first, str) else list(first)
    others = [second] if isinstance(second, str) else list(second)
    if not ones or not others or len(ones) not in (1, len(others)):
        raise BadRequest(
            f"got {len(ones)} and {len(others)} texts, want one and several, or as many of both",
            param="text_1",
        )
    pairs = [(i if len(ones) > 1 else 0, i) for i in range(len(others))]
    return Pairing(ones, others, pairs)


def encode_pair(tokenizer: Tokenizer, first: str, second: str) -> list[int]:
    """One after the other, each with what the tokenizer puts around a text."""
    return [*tokenizer.encode(first), *tokenizer.encode(second)]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """From -1 to 1; 0 where one of them is nothing."""
    length = math.hypot(*first) * math.hypot(*second)
    product = math.fsum(x * y for x, y in zip(first, second, strict=True))
    return product / length if length else 0.0

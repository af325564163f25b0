"""Hint: a text that came with the request and may be much like its answer; where they agree, it is
the guess.

The place in the hint moves along with the output. One token that is not there is taken for another
word in the same place; after two the place is lost, and found again where the newest tokens stand
in the hint, the nearest place behind the old one first. Requests without a hint get no guess from
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.request import Request, RequestId
from quire.spec.proposer import NOTHING, Guess
from quire.speculative import SpecConfig

SURE, NEAR = 3, 2  # newest tokens that find a lost place anywhere, and close to where it was lost
REACH = 16  # what is close
# Of each guess: at a place that was never lost, one that was found again, and behind a token that
# was not the hint's. Survival learns what they are worth.
CHANCE, CHANCE_AGAIN, CHANCE_DOUBTED = 0.9, 0.8, 0.5


@dataclass(slots=True)
class Followed:
    """One request's way through its hint."""

    tokens: tuple[int, ...]
    places: dict[tuple[int, ...], list[int]]  # where each run of SURE or NEAR tokens ends
    at: int | None = 0  # the next token of the hint; None: lost
    num_seen: int = 0  # of the output
    chance: float = CHANCE
    lost_at: int = 0
    newest: list[int] = field(default_factory=list)

    def move(self, token: int) -> None:
        self.num_seen += 1
        self.newest = [*self.newest, token][-SURE:]
        at = self.at
        if at is not None and at < len(self.tokens) and self.tokens[at] == token:
            self.at = at + 1
            self.chance = max(self.chance, CHANCE_AGAIN)
            return
        is_doubted = self.chance == CHANCE_DOUBTED
        if at is not None and not is_doubted:
            self.lost_at = at
        found = self._found()
        if found is not None:
            self.at, self.chance = found, CHANCE_AGAIN
        elif at is not None and not is_doubted:
            self.at, self.chance = at + 1, CHANCE_DOUBTED
        else:
            self.at = None

    def _found(self) -> int | None:
        """The place behind the newest tokens, if they are in the hint."""
        sure = self.places.get(tuple(self.newest), []) if len(self.newest) == SURE else []
        if sure:
            return next((place for place in sure if place >= self.lost_at), sure[-1])
        near = self.places.get(tuple(self.newest[-NEAR:]), []) if len(self.newest) >= NEAR else []
        return next((p for p in near if self.lost_at <= p <= self.lost_at + REACH), None)


class Hint:
    def __init__(self, config: SpecConfig) -> None:
        self._followed: dict[RequestId, Followed] = {}

    def propose(self, request: Request, most: int) -> Guess:
        if not request.hint:
            return NOTHING
        followed = self._followed.get(request.id)
        if followed is None:
            followed = self._followed[request.id] = _followed(request.hint)
        for token in request.tokens[request.num_prompt + followed.num_seen :]:
            followed.move(token)
        if followed.at is None:
            return NOTHING
        tokens = followed.tokens[followed.at : followed.at + most]
        return Guess((followed.chance,) * len(tokens), tokens) if tokens else NOTHING

    def forget(self, request: Request) -> None:
        self._followed.pop(request.id, None)


def _followed(tokens: tuple[int, ...]) -> Followed:
    places: dict[tuple[int, ...], list[int]] = {}
    for size in (SURE, NEAR):
        for end in range(size, len(tokens) + 1):
            places.setdefault(tokens[end - size : end], []).append(end)
    return Followed(tokens, places)

"""Hint: a text that came with the request and may be much like its answer; where they agree, it is
the guess.

The place in the hint moves along with the output. A token that is not there loses the place; it is
found again where the newest tokens stand in the hint, the nearest place behind the old one first.
Requests without a hint get no guess from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.request import Request, RequestId
from quire.spec.proposer import NOTHING, Guess
from quire.speculative import SpecConfig

AGAIN = 3  # newest tokens by which a lost place is found again
CHANCE = 0.9  # of each guess, at a place that was never lost; survival learns what it is worth
CHANCE_AGAIN = 0.7


@dataclass(slots=True)
class Followed:
    """One request's way through its hint."""

    tokens: tuple[int, ...]
    places: dict[tuple[int, ...], list[int]]  # where each run of AGAIN tokens ends
    at: int | None = 0  # the next token of the hint; None: lost
    num_seen: int = 0  # of the output
    was_lost: bool = False
    newest: list[int] = field(default_factory=list)
    lost_at: int = 0

    def move(self, token: int) -> None:
        self.num_seen += 1
        self.newest = [*self.newest, token][-AGAIN:]
        if self.at is not None and self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at += 1
            return
        if self.at is not None:
            self.lost_at, self.at, self.was_lost = self.at, None, True
        found = self.places.get(tuple(self.newest))
        if found:
            behind = [place for place in found if place >= self.lost_at]
            self.at = behind[0] if behind else found[-1]


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
        chance = CHANCE_AGAIN if followed.was_lost else CHANCE
        return Guess((chance,) * len(tokens), tokens) if tokens else NOTHING

    def forget(self, request: Request) -> None:
        self._followed.pop(request.id, None)


def _followed(tokens: tuple[int, ...]) -> Followed:
    places: dict[tuple[int, ...], list[int]] = {}
    for end in range(AGAIN, len(tokens) + 1):
        places.setdefault(tokens[end - AGAIN : end], []).append(end)
    return Followed(tokens, places)

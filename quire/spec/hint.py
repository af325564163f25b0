"""Hint: a text that came with the request and may be much like its answer; where they agree, it is
the guess.

Where the answer leaves the hint for good, it may still repeat itself or its prompt, so these are
followed as well (`followed.py`). Requests without a hint get no guess from here.
"""

from __future__ import annotations

from quire.request import Request, RequestId
from quire.spec.followed import Followed
from quire.spec.proposer import NOTHING, Guess
from quire.speculative import SpecConfig

BEFORE = 1 << 13  # newest tokens of a long prompt that are looked at


class Hint:
    def __init__(self, config: SpecConfig) -> None:
        self._followed: dict[RequestId, tuple[Followed, int]] = {}

    def propose(self, request: Request, most: int) -> Guess:
        if not request.hint:
            return NOTHING
        tokens, num_prompt = request.tokens, request.num_prompt
        followed, num_seen = self._followed.get(request.id) or (None, num_prompt)
        if followed is None:
            before = tokens[max(0, num_prompt - BEFORE) : num_prompt].tolist()
            followed = Followed(request.hint, before)
        for token in tokens[num_seen:]:
            followed.move(token)
        self._followed[request.id] = followed, len(tokens)
        return followed.guess(most)

    def forget(self, request: Request) -> None:
        self._followed.pop(request.id, None)

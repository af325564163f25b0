"""Ngram: what followed the last time the newest tokens stood together (prompt lookup).

The longest run of newest tokens, within limits, that the prompt or the output has had before; the
latest such place wins. The search is one for bytes in bytes, so there is nothing to keep or update.
"""

from __future__ import annotations

from array import array

from quire.request import Request
from quire.spec.proposer import NOTHING, Guess
from quire.speculative import SpecConfig

ITEM = array("i").itemsize
# How likely a continuation holds, by the length of the run that matched; `survival.py` corrects it.
CHANCES = (0.3, 0.55, 0.62, 0.75, 0.8)


class Ngram:
    def __init__(self, config: SpecConfig) -> None:
        self._sizes = config.ngram_sizes

    def propose(self, request: Request, most: int) -> Guess:
        text = request.tokens.tobytes()
        size, end = 0, -1
        for candidate in self._sizes:  # a longer run occurs no later than a shorter one
            found = _last_run(text, candidate)
            if found < 0:
                break
            size, end = candidate, found
        if end < 0:
            return NOTHING
        tokens = request.tokens[end : end + most].tolist()
        while len(tokens) < most:  # the run reaches into itself: it goes on in circles
            tokens.append(tokens[end - len(request.tokens)])
        return Guess((CHANCES[min(size, len(CHANCES)) - 1],) * most, tuple(tokens))

    def forget(self, request: Request) -> None:
        """Nothing is kept."""


def _last_run(text: bytes, size: int) -> int:
    """Where the latest earlier run of the last `size` tokens ends, in tokens; -1: nowhere."""
    length = size * ITEM
    pattern, stop = text[-length:], len(text) - ITEM
    if len(pattern) < length:
        return -1
    while (at := text.rfind(pattern, 0, stop)) >= 0:
        if at % ITEM == 0:
            return at // ITEM + size
        stop = at + length - 1  # it began inside a token
    return -1

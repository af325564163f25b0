"""Senders: who sends which request when, as answers come back.

Open: each request is sent when it is meant to be. Closed: so many clients send one request behind
another. In conversations a client also waits for the conversation's own last answer, as people do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from quire.bench.serve.work import Ask


class Sending(NamedTuple):
    at: float
    request: int  # its number


class Senders:
    def __init__(
        self, asks: Sequence[Ask], clients: int | None, conversations: Sequence[int] = ()
    ) -> None:
        """`clients`: None, open. `conversations`: of each request, or none at all."""
        self._asks, self._clients, self._conversations = asks, clients, conversations
        self._unsent = deque(range(len(asks)))
        self._waiting: dict[int, deque[int]] = defaultdict(deque)  # behind who speaks, by number
        self._speaking: set[int] = set()

    def first(self) -> list[Sending]:
        if self._clients is None:
            return [Sending(ask.at, index) for index, ask in enumerate(self._asks)]
        return [s for _ in range(self._clients) for s in self._next(0.0)]

    def ended(self, index: int, now: float) -> list[Sending]:
        """What is sent because this request was answered."""
        if self._clients is None:
            return []
        found = []
        if self._conversations:
            number = self._conversations[index]
            if self._waiting[number]:
                found.append(Sending(now, self._waiting[number].popleft()))
            else:
                self._speaking.remove(number)
        return found + self._next(now)

    def _next(self, now: float) -> list[Sending]:
        """A client is free; nothing, where it must wait or all is sent."""
        if not self._unsent:
            return []
        index = self._unsent.popleft()
        if self._conversations:
            number = self._conversations[index]
            if number in self._speaking:
                self._waiting[number].append(index)
                return []
            self._speaking.add(number)
        return [Sending(now, index)]

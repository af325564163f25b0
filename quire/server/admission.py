"""Admission: how much may be under way at once. Past it the answer is 429, at once and cheap.

Counted in sequences (n counts n) and in tokens (prompt plus what may be generated), over everything
accepted and unfinished. Retry-After follows the rate at which requests have been finishing.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque

from quire.errors import Overloaded
from quire.server.settings import Limits

WINDOW_S = 30.0


class Ticket:
    """Room taken by one request; give it back exactly once."""

    __slots__ = ("key", "num_sequences", "num_tokens")

    def __init__(self, key: str, num_sequences: int, num_tokens: int) -> None:
        self.key, self.num_sequences, self.num_tokens = key, num_sequences, num_tokens


class Admission:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.max_running = 1  # sequences the engine runs at once; known when it says hello
        self.num_open = 0
        self.num_open_tokens = 0
        self._by_key: Counter[str] = Counter()
        self._finished: deque[tuple[float, int]] = deque()

    def enter(self, key: str, num_sequences: int, num_tokens: int) -> Ticket:
        """Raises Overloaded when there is no room."""
        limits = self.limits
        most = self.max_running + limits.max_queued_requests
        if self.num_open + num_sequences > most:
            raise self._full(f"{self.num_open} of {most} places are taken", num_sequences)
        if self.num_open and self.num_open_tokens + num_tokens > limits.max_queued_tokens:
            raise self._full(
                f"{self.num_open_tokens} of {limits.max_queued_tokens} tokens are spoken for",
                num_sequences,
            )
        if 0 < limits.max_requests_per_key <= self._by_key[key]:
            raise self._full(f"this key has {self._by_key[key]} requests open", num_sequences)
        self.num_open += num_sequences
        self.num_open_tokens += num_tokens
        self._by_key[key] += 1
        return Ticket(key, num_sequences, num_tokens)

    def leave(self, ticket: Ticket) -> None:
        self.num_open -= ticket.num_sequences
        self.num_open_tokens -= ticket.num_tokens
        self._by_key[ticket.key] -= 1
        if not self._by_key[ticket.key]:
            del self._by_key[ticket.key]
        self._finished.append((time.monotonic(), ticket.num_sequences))
        self._forget_old()

    def _forget_old(self) -> None:
        oldest = time.monotonic() - WINDOW_S
        while self._finished and self._finished[0][0] < oldest:
            self._finished.popleft()

    def _full(self, why: str, wanted: int) -> Overloaded:
        return Overloaded(
            f"the server is full: {why}; try again later", retry_after_s=self._retry_after(wanted)
        )

    def _retry_after(self, wanted: int) -> int:
        """Seconds until about that many places are free, at the pace of the last half minute."""
        self._forget_old()
        done = sum(count for _, count in self._finished)
        if not done:
            return 5
        return max(1, min(60, math.ceil(wanted * WINDOW_S / done)))

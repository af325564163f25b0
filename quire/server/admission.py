"""Admission: how much may be under way at once. Past it the answer is 429, at once and cheap.

A place is one HTTP request, however many prompts and answers it asks for: one that asks for many
is refused when the server is full and not because it is large. Its parts go to the engine one
behind another. The first goes at once; each later one waits until the engine has less than two
full batches or none of this request's own, and large requests take turns. So a long list neither
holds up a short request nor is ever stuck. Tokens (prompt plus what may be generated) are counted
for parts in the engine. Retry-After follows the rate at which requests have been finishing.

Where the engine is fair among keys, so is this: a full server still takes a request of a key that
holds less than an equal share of the places, so at most twice as many are open as otherwise.
Several API processes count together on a board (`board.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from typing import NamedTuple

from quire.errors import Overloaded
from quire.server.board import Alone, Taken
from quire.server.settings import Limits

WINDOW_S = 30.0
LOOK_S = 0.02  # how often a waiting part looks at what other processes gave back
BATCHES = 2  # one that runs, and one that is there when it ends


class Size(NamedTuple):
    """What one part takes up in the engine."""

    num_sequences: int  # n
    num_tokens: int


class Ticket:
    """One HTTP request: its place, and what its parts in the engine hold. Give it back once."""

    __slots__ = ("begun", "key", "num_parts", "num_sequences", "num_tokens")

    def __init__(self, key: str) -> None:
        self.key, self.begun = key, time.monotonic()
        self.num_parts = self.num_sequences = self.num_tokens = 0


class Waiting(NamedTuple):
    """The next part of a request; there is one at a time for each."""

    ticket: Ticket
    size: Size
    entered: asyncio.Future[None]


class Admission:
    def __init__(self, limits: Limits, is_fair: bool = False, board: Alone | None = None) -> None:
        self.limits, self._is_fair, self._board = limits, is_fair, board or Alone()
        self.max_running = 1  # sequences the engine runs at once; known when it says hello
        self.num_open = 0  # requests
        self.num_open_sequences = 0
        self.num_open_tokens = 0
        self._by_key: Counter[str] = Counter()
        self._line: deque[Waiting] = deque()
        self._finished: deque[float] = deque()

    # ------------------------------------------------------------ requests

    def enter(self, key: str, first: Size) -> Ticket:
        """A request with its first part. Raises Overloaded when there is no room."""
        with self._board.locked():
            self._check_room(key, first, self._board.others(key))
            self.num_open += 1
            self._by_key[key] += 1
            ticket = Ticket(key)
            self._add(ticket, first, 1)
        return ticket

    def _check_room(self, key: str, first: Size, others: Taken) -> None:
        limits = self.limits
        most = self.max_running + limits.max_queued_requests
        num_open = self.num_open + others.num_open
        num_tokens = self.num_open_tokens + others.num_tokens
        of_key = self._by_key[key] + others.of_key
        num_keys = len(self._by_key.keys() | others.keys | {key})
        is_below_share = self._is_fair and num_keys > 1 and of_key < most // num_keys
        if num_open >= most and not is_below_share:
            raise self._full(f"{num_open} of {most} places are taken")
        is_heavy = num_open > 0 and num_tokens + first.num_tokens > limits.max_queued_tokens
        if is_heavy and not is_below_share:
            raise self._full(f"{num_tokens} of {limits.max_queued_tokens} tokens are spoken for")
        if 0 < limits.max_requests_per_key <= of_key:
            raise self._full(f"this key has {of_key} requests open")

    def leave(self, ticket: Ticket) -> None:
        """The request is over, and with it whatever its parts still hold."""
        self.num_open -= 1
        self.num_open_sequences -= ticket.num_sequences
        self.num_open_tokens -= ticket.num_tokens
        self._by_key[ticket.key] -= 1
        if not self._by_key[ticket.key]:
            del self._by_key[ticket.key]
        self._write(ticket.key)
        self._finished.append(time.monotonic())
        self._forget_old()
        self._call_up()

    # ------------------------------------------------------------ parts

    async def enter_part(self, ticket: Ticket, size: Size) -> None:
        """A further part, once there is room for it."""
        waiting = Waiting(ticket, size, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        self._call_up()
        try:
            while not await self._has_entered(waiting):
                self._call_up()
        except asyncio.CancelledError:
            waiting.entered.cancel()  # nothing happens to one that is done
            if waiting.entered.cancelled():
                self._call_up()  # it may have been first in line
            else:  # called up in the moment its client left
                self.leave_part(ticket, size)
            raise

    async def _has_entered(self, waiting: Waiting) -> bool:
        """Whether it was called up; where other processes may have made room, not for long."""
        if type(self._board) is Alone:
            await waiting.entered
        else:
            await asyncio.wait({waiting.entered}, timeout=LOOK_S)
        return waiting.entered.done()

    def leave_part(self, ticket: Ticket, size: Size) -> None:
        self._add(ticket, size, -1)
        self._call_up()

    def _call_up(self) -> None:
        """Let in whom there is room for. Room goes to the first in line that needs it; those whose
        other parts are done need none."""
        kept: deque[Waiting] = deque()
        for waiting in self._line:
            if waiting.entered.cancelled():
                continue
            if waiting.ticket.num_parts and (
                kept or not self._has_room(waiting.ticket.key, waiting.size)
            ):
                kept.append(waiting)
                continue
            self._add(waiting.ticket, waiting.size, 1)
            waiting.entered.set_result(None)
        self._line = kept

    def _has_room(self, key: str, size: Size) -> bool:
        most, others = BATCHES * self.max_running, self._board.others(key)
        num_sequences = self.num_open_sequences + others.num_sequences + size.num_sequences
        num_tokens = self.num_open_tokens + others.num_tokens + size.num_tokens
        return num_sequences <= most and num_tokens <= self.limits.max_queued_tokens

    def _add(self, ticket: Ticket, size: Size, sign: int) -> None:
        num_sequences, num_tokens = sign * size.num_sequences, sign * size.num_tokens
        ticket.num_parts += sign
        ticket.num_sequences += num_sequences
        ticket.num_tokens += num_tokens
        self.num_open_sequences += num_sequences
        self.num_open_tokens += num_tokens
        self._write(ticket.key)

    def _write(self, key: str) -> None:
        counts = (self.num_open, self.num_open_sequences, self.num_open_tokens)
        self._board.write(counts, key, self._by_key.get(key, 0))

    # ------------------------------------------------------------ refusals

    def _forget_old(self) -> None:
        oldest = time.monotonic() - WINDOW_S
        while self._finished and self._finished[0] < oldest:
            self._finished.popleft()

    def _full(self, why: str) -> Overloaded:
        return Overloaded(
            f"the server is full: {why}; try again later", retry_after_s=self._retry_after()
        )

    def _retry_after(self) -> int:
        """Seconds until about one place is free, at the pace of the last half minute."""
        self._forget_old()
        if not self._finished:
            return 5
        return max(1, min(60, math.ceil(WINDOW_S / len(self._finished))))

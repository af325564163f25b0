"""Turnstile: a few requests at each turn of the event loop, first come first served.

To check a request and make it ready for the engine takes a fraction of a millisecond in which no
token of anybody moves. When hundreds come at once they would hold up every stream until the last of
them is in; so between a few of them the loop looks at its sockets. Whoever comes alone never waits.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 8


class Turnstile:
    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._per_turn = self._room = per_turn  # room that is left in this turn
        self._is_turning = False  # the next turn is announced

    async def enter(self) -> None:
        """Returns in this turn of the loop when there is room in it, else in a later one."""
        self._turn_later()
        if self._room > 0:
            self._room -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _turn_later(self) -> None:
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_turning, self._room = False, self._per_turn
        while self._waiting and self._room:
            place = self._waiting.popleft()
            if not place.done():  # else its client left
                place.set_result(None)
                self._room -= 1
        if self._room < self._per_turn:
            self._turn_later()

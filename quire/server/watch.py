"""Watchman: one slow look a second over every open request, so that the fast path needs no timers.

It ends generations whose deadline passed, drops clients that do not take what is sent to them, and
wakes streams that have been quiet so that they can say they are still there.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire.server.hang_up import Address, hang_up
from quire.server.problems import Expired
from quire.server.settings import Limits

if TYPE_CHECKING:
    from quire.server.generation import Generation
    from quire.server.http import HttpRequest

LOOK_S = 1.0
PING_S = 15.0


class Watchman:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._requests: dict[int, HttpRequest] = {}
        self.generations: set[Generation] = set()
        self._dropped: list[Address] = []

    def enter(self, request: HttpRequest) -> None:
        self._requests[id(request)] = request

    def leave(self, request: HttpRequest) -> None:
        self._requests.pop(id(request), None)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        for request in list(self._requests.values()):
            # Past the deadline all tokens may be here, on their way to a client that sips them.
            for since in (request.sending_since, request.deadline):
                if since is not None and now - since > self.limits.write_stall_s:
                    self._drop(request)
                    break
        for generation in list(self.generations):
            self._look_at(generation, now)
        if self._dropped:
            hang_up(self._dropped)
            self._dropped.clear()

    def _look_at(self, generation: Generation, now: float) -> None:
        if now > generation.deadline:
            seconds = generation.timeout_s
            generation.tap.fail(
                Expired(f"not done within {seconds:g} s, the request's deadline", is_queue=False)
            )
        elif now - generation.heard > PING_S:
            generation.heard = now
            generation.tap.poke()

    def _drop(self, request: HttpRequest) -> None:
        request.notes["finish_reason"] = "slow reader"
        if request.task is not None:
            request.task.cancel()
        if request.client is not None:
            self._dropped.append(request.client)

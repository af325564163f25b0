"""Proxy: one request to one upstream, or to the next one while nothing has been answered.

Retried is what cannot have been done twice: a request that never reached an upstream, or one that
only computes and whose answer has not begun. An upstream that is full or draining passes it on.
Once the first byte has gone to the client there is no second try: the stream ends as the
upstream's did.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.router.choose import Chooser, Prompt
from quire.router.http_client import Answer, Headers, HttpClient, NotAnswered
from quire.router.place import Place
from quire.router.upstream import State, Upstream

PASSES_ON = (429, 502, 503)  # another upstream may do better


@dataclass(slots=True)
class Asked:
    """A client's request, ready to be sent on."""

    method: str
    target: str  # path and query
    headers: Headers
    body: bytes
    prompt: Prompt
    more: AsyncIterator[bytes] | None = None  # the rest of a body too long to be kept
    may_repeat: bool = True  # it computes and stores nothing
    needs_home: bool = False  # it is about something that one upstream keeps
    fields: dict[str, Any] | None = None  # of a body with a prompt


class Placed(NamedTuple):
    upstream: Upstream
    answer: Answer
    place: Place


class Proxy:
    def __init__(
        self,
        upstreams: Sequence[Upstream],
        clients: dict[str, HttpClient],
        chooser: Chooser,
        attempts: int,
        head_s: float,
    ) -> None:
        self.upstreams, self.clients, self.chooser = upstreams, clients, chooser
        self.attempts, self.head_s = attempts, head_s
        self.num_retried = 0

    async def place(self, asked: Asked) -> Placed | NotAnswered:
        """An answer whose head has come, or why there is none. Leave its place when done."""
        tried: list[Upstream] = []
        last: Placed | NotAnswered = NotAnswered("no upstream is ready", was_sent=False)
        while len(tried) < self.attempts:
            upstream = self._choose(asked, tried)
            if upstream is None:
                break
            if tried:
                self.num_retried += 1
            tried.append(upstream)
            if isinstance(last, Placed):
                self._drop(last)
            last = await self._try(upstream, asked)
            if isinstance(last, Placed):
                if last.answer.status not in PASSES_ON or not asked.may_repeat:
                    break
            elif asked.more is not None or (last.was_sent and not asked.may_repeat):
                break
        return last

    def _choose(self, asked: Asked, tried: Sequence[Upstream]) -> Upstream | None:
        if asked.needs_home:
            home = next((one for one in self.upstreams if one.state is State.UP), None)
            return None if home in tried else home
        return self.chooser.choose(self.upstreams, asked.prompt, tried)

    async def _try(self, upstream: Upstream, asked: Asked) -> Placed | NotAnswered:
        place = Place.take(upstream, asked.prompt, time.monotonic())
        try:
            answer = await self.clients[upstream.name].send(
                asked.method, asked.target, asked.headers, asked.body, asked.more, self.head_s
            )
        except NotAnswered as error:
            place.leave()
            upstream.num_failed += 1
            if not error.was_sent:
                upstream.went_down(str(error))
            return error
        except BaseException:
            place.leave()
            raise
        return Placed(upstream, answer, place)

    @staticmethod
    def _drop(placed: Placed) -> None:
        placed.answer.close()
        placed.place.leave()

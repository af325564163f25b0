"""The waiting line: first come first served, or priority with aging. `fair.py` has the fair one.

Aging needs no clock: every waiting request gains rank at the same rate, so the order by
priority - waited / aging is the order by priority + arrival / aging, which never changes. Both
orders are therefore one heap with a fixed key. A preempted request keeps its arrival and so comes
back near the front.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping

from quire.request import Request, RequestId

OrderKey = Callable[[Request], float]


BEHIND_ALL = 1e15  # more than any arrival, priority or turn


class WaitingLine:
    """A heap with a fixed key, and the same requests by id."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._by_id: dict[RequestId, Request] = {}
        # To be computed of requests that somebody waits for, cache hits aside.
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """In order of service."""
        return (request for _, _, request in sorted(self._heap))

    def get(self, request_id: RequestId) -> Request | None:
        return self._by_id.get(request_id)

    def push(self, request: Request) -> None:
        self._note(request)
        heapq.heappush(self._heap, (self._key(request), request.id, request))

    def peek(self) -> Request:
        return self._heap[0][2]

    def pop(self, num_cached: int = 0) -> Request:
        """Take the first; `num_cached` tokens of it need not be computed."""
        request = heapq.heappop(self._heap)[2]
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        self._heap = [item for item in self._heap if item[2] is not request]
        heapq.heapify(self._heap)
        self._forget(request)

    def ended(self, request: Request) -> None:
        """A request is over; a line that keeps accounts settles them."""

    def victim(self, running: Mapping[RequestId, Request]) -> Request:
        """The running request that would be served last; ties go to the youngest."""
        return max(running.values(), key=lambda request: (self._key(request), request.id))

    def is_owed(self, running: Mapping[RequestId, Request]) -> bool:
        """Whether the first in line shall not wait until somebody ends. May be asked when empty."""
        return False

    def displaced(self, running: Mapping[RequestId, Request]) -> Request | None:
        """The running request that makes room for the first in line, where that is owed it."""
        return None

    def _note(self, request: Request) -> None:
        assert request.id not in self._by_id, f"request {request.id} waits already"
        self._by_id[request.id] = request
        self.num_tokens += 0 if request.is_background else len(request.tokens)

    def _forget(self, request: Request) -> None:
        del self._by_id[request.id]
        self.num_tokens -= 0 if request.is_background else len(request.tokens)

    def oldest_arrival(self) -> float | None:
        """Of requests that somebody waits for; None when there are none."""
        found = (r.timing.arrival for r in self._by_id.values() if not r.is_background)
        return min(found, default=None)

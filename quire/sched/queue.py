"""The waiting line: first come first served, or priority with aging. `fair.py` has the fair one.

Aging needs no clock: every waiting request gains rank at the same rate, so the order by
priority - waited / aging is the order by priority + arrival / aging, which never changes. Both
orders are therefore one sorted list with a fixed key: whoever leaves the line, of ten thousand that
hang up at once, is found by halving. A preempted request keeps its arrival and so comes back near
the front.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

from quire.request import Request, RequestId

OrderKey = Callable[[Request], float]
Place = tuple[float, RequestId, Request]  # ids differ, so requests are never compared


BEHIND_ALL = 1e15  # more than any arrival, priority or turn


class WaitingLine:
    """A list sorted by a fixed key, and the same requests by id."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._places: list[Place] = []
        self._by_id: dict[RequestId, Request] = {}
        # To be computed of requests that somebody waits for, cache hits aside.
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """In order of service."""
        return (request for _, _, request in self._places)

    def get(self, request_id: RequestId) -> Request | None:
        return self._by_id.get(request_id)

    def push(self, request: Request) -> None:
        self._note(request)
        insort(self._places, (self._key(request), request.id, request))

    def peek(self) -> Request:
        return self._places[0][2]

    def pop(self, num_cached: int = 0) -> Request:
        """Take the first; `num_cached` tokens of it need not be computed."""
        request = self._places.pop(0)[2]
        self._forget(request)
        return request

    def remove(self, request: Request) -> None:
        take_out(self._places, (self._key(request), request.id, request))
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


def take_out(places: list[Place], place: Place) -> None:
    """Of a sorted list."""
    at = bisect_left(places, place)
    assert places[at][2] is place[2], f"request {place[1]} is not where its key says"
    del places[at]

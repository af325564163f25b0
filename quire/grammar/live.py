"""LiveMatchers: the matchers of the requests under way, by request id.

The engine puts a matcher in when its grammar is compiled and takes it out when the request ends;
the runner advances it. Plans stay plain values: they name requests, and this is where the runner
finds what a name stands for.
"""

from __future__ import annotations

from quire.grammar.matcher import Matcher
from quire.request import RequestId


class LiveMatchers:
    def __init__(self) -> None:
        self._matchers: dict[RequestId, Matcher] = {}

    def __len__(self) -> int:
        return len(self._matchers)

    def add(self, request_id: RequestId, matcher: Matcher) -> None:
        assert request_id not in self._matchers, f"request {request_id} has a matcher already"
        self._matchers[request_id] = matcher

    def get(self, request_id: RequestId) -> Matcher | None:
        """None for a request that has ended."""
        return self._matchers.get(request_id)

    def drop(self, request_id: RequestId) -> None:
        """Forget a request; those without a matcher are welcome."""
        self._matchers.pop(request_id, None)

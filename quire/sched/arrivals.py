"""Arrivals: requests whose pages are on their way from another tier. They wait beside the line.

Whoever comes to the front of the line and has pages on a disk or in another engine steps aside
until these are in memory, and others pass. Then it goes back to the line, near the front, since it
keeps its arrival. Pages that do not come are computed: nobody waits for what is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.kv.manager import KVManager
from quire.request import Request, RequestId


class Arrivals:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._waiting: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, request: Request) -> bool:
        """Whether the request, first in line, steps aside until its pages are there."""
        if not self._kv.fetch(request):
            return False
        self._waiting[request.id] = request
        return True

    def collect(self, push: Callable[[Request], None]) -> None:
        """Send those back to the line whose pages have come, or will not."""
        if not self._waiting:
            return
        for request in list(self._waiting.values()):
            if not self._kv.is_arriving(request):
                del self._waiting[request.id]
                push(request)

    def pop(self, request_id: RequestId) -> Request | None:
        return self._waiting.pop(request_id, None)

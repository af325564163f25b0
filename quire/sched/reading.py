"""Reading: who fills pages in the step planned last, so that they are hashed while it runs.

`commit` would hash them otherwise, at a time when somebody waits for the token.
"""

from __future__ import annotations

from quire.kv.manager import KVManager
from quire.request import Request


class Reading:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._requests: list[Request] = []

    def note(self, request: Request, num_tokens: int) -> None:
        """A step that is being planned feeds so many."""
        if num_tokens >= self._kv.page_size:
            self._requests.append(request)

    def hash_pages(self) -> None:
        """Of the previous step, which with overlap still runs."""
        for request in self._requests:
            if request.num_inflight:
                self._kv.hash_ahead(request, request.num_computed + request.num_inflight)
        self._requests.clear()

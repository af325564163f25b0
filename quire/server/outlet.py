"""Outlet: the client's end of a stream, for whoever has bytes for it, be it its task or not.

ASGI sends by awaiting, which is a task's affair; yet nearly always the HTTP server takes the bytes
at once. So the first step of a send is taken right here, and only a client that is behind leaves
something to await. Whose turn it is to write is for the callers to know (`link.Tap`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quire.server.http import HttpRequest, Send


class Way(Protocol):
    """To the client, for one of those who have bytes for it."""

    @property
    def is_open(self) -> bool:
        """Whether it may write now."""
        ...

    def write(self, chunk: bytes) -> Awaitable[None] | None:
        """None when the bytes are on their way; else what it has to await before it goes on."""
        ...


class Outlet:
    def __init__(self) -> None:
        self._request: HttpRequest | None = None
        self._send: Send | None = None

    @property
    def is_open(self) -> bool:
        return self._send is not None

    def open(self, request: HttpRequest, send: Send) -> None:
        """Call this when the status line was sent: before, errors are replies of their own."""
        self._request, self._send = request, send

    def write(self, chunk: bytes) -> Awaitable[None] | None:
        """None when the bytes are on their way; else what to await before anything else is written.
        The watchman sees to it that this does not take for ever."""
        assert self._send is not None and self._request is not None
        sending = self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        waiting = sending.__await__()
        try:
            first = next(waiting)
        except StopIteration:
            return None
        self._request.sending_since = time.monotonic()
        return _Rest(self._request, first, waiting)


class _Rest:
    """The rest of a send that has to wait, of which the first step was taken."""

    def __init__(self, request: HttpRequest, first: object, waiting: Iterator[object]) -> None:
        self._request, self._first, self._waiting = request, first, waiting

    def __await__(self) -> Generator[Any, None, None]:
        yield self._first
        yield from self._waiting
        self._request.sending_since = None

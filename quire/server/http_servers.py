"""The HTTP servers under the app: granian, and uvicorn where granian has no wheel. Both in this
process and on its loop, HTTP/1.1 only, with the same limits on heads: 128 KB and ten seconds.

Bodies, routes and everything after the head are the app's business. Uvicorn gives a client all the
time in the world for its head, so its protocol gets a timer here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from quire.server.http import Receive, Scope, Send
from quire.server.settings import ServeSettings

HEAD_S = 10.0
MAX_HEAD_BYTES = 128 << 10  # refused with a better message from half of that on
BACKLOG, MAX_CONNECTIONS = 2_048, 20_000


Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class HttpServer(Protocol):
    """As much of granian's and uvicorn's servers as we use."""

    async def serve(self) -> None: ...


def make_http_server(settings: ServeSettings, app: Asgi) -> HttpServer:
    return _uvicorn(settings, app) if settings.http_server == "uvicorn" else _granian(settings, app)


def stop_http_server(server: Any) -> None:
    if hasattr(server, "stop"):
        server.stop()
    else:
        server.should_exit = True


def _granian(settings: ServeSettings, app: Asgi) -> HttpServer:
    from granian.constants import HTTPModes, Interfaces
    from granian.http import HTTP1Settings
    from granian.server.embed import Server as Granian

    made: HttpServer = Granian(
        app,
        address=settings.host,
        port=settings.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(
            header_read_timeout=int(HEAD_S * 1_000), max_buffer_size=MAX_HEAD_BYTES
        ),
        websockets=False,
        backlog=BACKLOG,
        backpressure=MAX_CONNECTIONS,
        log_enabled=False,
    )
    return made


def _uvicorn(settings: ServeSettings, app: Asgi) -> HttpServer:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol  # httptools takes heads of any size

    class TimedProtocol(H11Protocol):
        """Closes a connection whose next head is not complete in time."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timer = self.loop.call_later(HEAD_S, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            has_head = self.cycle is not None and not self.cycle.response_complete
            if has_head and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            elif not has_head and self._timer is None:
                self._timer = self.loop.call_later(HEAD_S, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

    asgi: Any = app
    server: Any = uvicorn.Server(
        uvicorn.Config(
            asgi,
            host=settings.host,
            port=settings.port,
            lifespan="off",
            log_level="error",  # a warning for each odd request would be for clients to write
            access_log=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            http=TimedProtocol,
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=2,
        )
    )
    server.install_signal_handlers = lambda: None  # ours drain first
    if settings.api_processes > 1:
        server.serve = partial(server.serve, sockets=[_shared_port(settings)])
    made: HttpServer = server
    return made


def _shared_port(settings: ServeSettings) -> socket.socket:
    """A socket on a port that other processes of ours listen on too, as granian's always is."""
    family, _, _, _, address = socket.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM
    )[0]
    made = socket.socket(family, socket.SOCK_STREAM)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind(address)
    return made

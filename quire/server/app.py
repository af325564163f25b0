"""App: the route table, and what happens around every handler. Deny by default.

A request is: head checked, route found, caller known, body read, handler run, answer sent, one log
line written. Everything needs a key except what the table marks public. A handler that raises one
of our errors becomes that error's answer; anything else is a 500 that names the request, and the
traceback goes to the log, never to the client.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from quire.obs.log import AccessRecord, log_access, log_event
from quire.server.cascade import Escalated
from quire.server.handover import TICKET_HEADER
from quire.server.http import (
    BodyRoom,
    ClientGone,
    EventStream,
    HttpRequest,
    Receive,
    Reply,
    Scope,
    Send,
    check_values,
    discard_body,
    end_stream,
    read_body,
    read_head,
    send_reply,
    send_stream,
    spool_body,
    wait_gone,
)
from quire.server.keys import Caller
from quire.server.origins import check_browser, cors_headers, preflight
from quire.server.problems import Problem, problem_of
from quire.server.server import Server
from quire.server.turnstile import Turnstile

Handler = Callable[[HttpRequest, Server], Awaitable[Reply | EventStream]]

PUBLIC, KEY, ADMIN = "public", "key", "admin"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_UNPRINTABLE = re.compile(r"[^ -~]")  # names of fields are the client's: no line may end in them


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str  # may end in "/{}": the rest is given to the handler as path_value
    handler: Handler
    access: str = KEY
    style: str = "openai"  # of error bodies
    spools: bool = False  # the body goes to a file: it may be larger than any other


class App:
    """An ASGI application."""

    def __init__(self, server: Server, routes: list[Route]) -> None:
        self.server, self.routes = server, routes
        self.room = BodyRoom(server.limits.max_open_body_bytes // server.settings.api_processes)
        self.turnstile = Turnstile()
        self._exact = {(r.method, r.path): r for r in routes if not r.path.endswith("{}")}
        self._open_ended = [r for r in routes if r.path.endswith("{}")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        exchange = Exchange(self, scope, receive, send)
        status = 499  # the client left
        with suppress(ClientGone):
            status = await exchange.run()
        request, route = exchange.request, exchange.route
        name = route.path if route is not None else "unknown"
        seconds = time.monotonic() - begun
        self.server.metrics.http(name, status, seconds)
        if status == 499:
            self.server.metrics.disconnected()
        notes: dict[str, Any] = dict(request.notes) if request is not None else {}
        record = AccessRecord(exchange.id, scope["method"], name, status, seconds, **notes)
        # Probes and page files come by the thousand and say nothing while all is well.
        is_dull = route is not None and route.access == PUBLIC and status < 400
        log_access(record, logging.DEBUG if is_dull else logging.INFO)

    # ------------------------------------------------------------ routing

    def find(self, method: str, path: str) -> tuple[Route, str] | None:
        """The route and the open end of its path; raises Problem 405 for another method."""
        method = "GET" if method == "HEAD" else method
        if (route := self._exact.get((method, path))) is not None:
            return route, ""
        for route in self._open_ended:
            stem = route.path[:-2]
            if route.method == method and path.startswith(stem) and len(path) > len(stem):
                return route, path[len(stem) :]
        allowed = sorted({r.method for r in self.routes if r.path == path})
        if allowed:
            want = " or ".join(allowed)
            raise Problem(405, f"got {method} {path}, want {want}", allow=", ".join(allowed))
        return None

    def error_style(self, path: str) -> str:
        """Of a path that may not exist: as at the route it is, or lies below, or as at all routes
        beside it."""
        near = (r.style for r in self.routes if f"{path}/".startswith(f"{r.path}/"))
        folder = path.rpartition("/")[0] + "/"
        beside = {r.style for r in self.routes if r.path.startswith(folder)}
        return next(near, beside.pop() if len(beside) == 1 else "openai")


class Exchange:
    """One request on its way through the app."""

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self.app, self.server = app, app.server
        self._scope, self._receive, self._send = scope, receive, send
        self.id = _request_id(scope)
        self.request: HttpRequest | None = None
        self.route: Route | None = None
        self._has_started = False
        self._stream: EventStream | None = None

    async def run(self) -> int:
        """Answer; returns the status that was sent."""
        try:
            request = self.request = read_head(self._scope, self.id)
            if request.method == "OPTIONS":
                return await self._reply(preflight(request, self.server))
            check_browser(request, self.server)
            route = self._admit(request)
            await self._read(request, route)
            return await self._handle(request, route)
        except ClientGone:
            await self._end_unread()
            raise
        except Exception as error:
            return await self._fail(error)
        finally:
            if self.request is not None:
                self.app.room.release(self.request)
                if self.request.spool is not None:
                    self.request.spool.unlink(missing_ok=True)

    async def _read(self, request: HttpRequest, route: Route) -> None:
        server = self.server
        if route.spools and server.shelf is not None:
            request.spool = server.shelf.files.new_spool()
            await spool_body(request, self._receive, server.limits)
            return
        request.body = await read_body(request, self._receive, server.limits, self.app.room)
        check_values(request.body, server.limits)

    def _admit(self, request: HttpRequest) -> Route:
        """Caller before route: a stranger learns nothing of what exists."""
        request.caller = self._caller(request)
        problem: Problem | None = None
        found = None
        try:
            found = self.app.find(request.method, request.path)
        except Problem as error:
            problem = error
        self.route = found[0] if found else None
        access = self.route.access if self.route is not None else KEY
        if access != PUBLIC and request.caller is None:
            self.server.metrics.rejected("unauthorized")
            raise Problem(401, "missing or wrong API key", code="invalid_api_key")
        if access == ADMIN and request.caller is not None and not request.caller.is_admin:
            raise Problem(403, "this needs an admin key (--admin-api-key)")
        if problem is not None:
            raise problem
        if found is None:
            raise Problem(404, f"no such path: {request.path[:200]}", code="not_found")
        request.path_value = found[1]
        return found[0]

    def _caller(self, request: HttpRequest) -> Caller | None:
        caller = self.server.keys.caller(request.headers)
        if caller is not None and self.server.keys.is_open and not self.server.settings.is_local:
            return replace(caller, is_admin=False)  # strangers may use it, not run it
        return caller

    async def _handle(self, request: HttpRequest, route: Route) -> int:
        """Run the handler until it is done or the client has left."""
        work = asyncio.ensure_future(self._answer(request, route))
        gone = asyncio.ensure_future(wait_gone(self._receive))
        request.task = work
        self.server.watchman.enter(request)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise ClientGone
        except asyncio.CancelledError:
            raise ClientGone from None
        finally:
            self.server.watchman.leave(request)
            for task in (work, gone):
                task.cancel()
            # The handler's own clean-up (aborting its generation) happens before we go on.
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, request: HttpRequest, route: Route) -> int:
        if route.access != PUBLIC:
            await self.app.turnstile.enter()
        models = self.server.models
        server = self.server if models is None else await models.serving(request)
        try:
            return await self._answer_by(server, request, route)
        except Escalated as why:
            assert models is not None and not self._has_started
            server = await models.escalated(request, why)
        return await self._answer_by(server, request, route)

    async def _answer_by(self, server: Server, request: HttpRequest, route: Route) -> int:
        answer = await route.handler(request, server)
        if isinstance(answer, Reply):
            return await self._reply(answer)
        if request.method == "HEAD":
            return await self._reply(Reply(b"", content_type=answer.content_type))
        if request.route is None or request.route.gate is None:  # else it may be read again
            self._let_go_of_body(request)
        self._stream = answer
        self.server.metrics.stream_opened()
        try:
            await send_stream(request, answer, self._send, self._starting_headers)
        finally:
            self.server.metrics.stream_closed()
        await end_stream(self._send)
        return 200

    # ------------------------------------------------------------ sending

    def _let_go_of_body(self, request: HttpRequest) -> None:
        request.body = b""
        self.app.room.release(request)  # streams are long

    def _starting_headers(self) -> list[tuple[bytes, bytes]]:
        self._has_started = True
        if self.request is not None:
            self._let_go_of_body(self.request)
        return self._headers()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", self.id.encode()), (b"x-content-type-options", b"nosniff")]
        request = self.request
        if request is not None:
            if request.warnings:
                text = _UNPRINTABLE.sub("?", "; ".join(request.warnings)[:1_000])
                headers.append((b"x-quire-warning", text.encode("ascii")))
            if request.kv_ticket:
                headers.append((TICKET_HEADER, request.kv_ticket.encode("ascii")))
            headers += [*request.answer_headers, *cors_headers(request, self.server)]
        return headers

    async def _reply(self, reply: Reply) -> int:
        self._has_started = True
        if self._scope["method"] == "HEAD":
            reply = Reply(b"", reply.status, reply.content_type, reply.headers)
        await send_reply(reply, self._send, self._headers())
        return reply.status

    async def _end_unread(self) -> None:
        """A body that broke off: its sender has left, or sent what is no body and still listens."""
        if self.request is not None and not self.request.has_body:
            problem = Problem(400, "the body broke off", closes=True)
            with suppress(Exception):
                style = self.app.error_style(self.request.path)
                await self._reply(Reply(problem.body(style), 400, headers=problem.headers))

    async def _fail(self, error: Exception) -> int:
        problem = problem_of(error)
        if problem is None:
            log_event(
                "bug",
                severity=logging.ERROR,
                request_id=self.id,
                traceback=traceback.format_exc(),
            )
            problem = Problem(500, f"internal error; the log has it under {self.id}")
        if problem.status in (400, 413, 429, 503):
            self.server.metrics.rejected(problem.code or "bad_request")
        if self._has_started:
            if self._stream is not None:
                with suppress(Exception):
                    await end_stream(self._send, self._stream.failure(problem))
            return problem.status
        if self.request is not None and not self.request.has_body:
            self.app.room.release(self.request)
            await discard_body(self.request, self._receive, self.server.limits)
        style = self.app.error_style(self._scope["path"])
        return await self._reply(
            Reply(problem.body(style), problem.status, headers=problem.headers)
        )


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name.lower() == b"x-request-id":
            text = str(value.decode("latin-1"))
            if _REQUEST_ID.fullmatch(text):
                return text
    return f"req-{secrets.token_hex(12)}"


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

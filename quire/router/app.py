"""RouterApp: ASGI in front of the upstreams. Everything but a few verbs of its own is passed on.

    GET  /health, /ready            of the router; ready while one upstream is
    GET  /metrics                   its counts
    GET  /router/upstreams          what it knows of each
    POST /router/drain/NAME         sends it nothing more; what it has may finish
    POST /router/resume/NAME

Keys are the upstreams' business: headers pass through. The router's own verbs need the admin key
where one was given.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import h11

from quire.router.choose import Prompt
from quire.router.http_client import Headers, NotAnswered
from quire.router.metrics import metrics_text
from quire.router.prompt_keys import PromptKeys
from quire.router.proxy import Asked, Placed, Proxy
from quire.router.settings import RouterSettings
from quire.router.tickets import OWN_HEADERS, Tickets
from quire.router.upstream import Upstream
from quire.server.http import Receive, Scope, Send, wait_gone
from quire.server.keys import KeyRing, presented_key

MOST_KEPT = 8 << 20  # bytes of a body that can be sent twice
# They create or speak of things that one upstream keeps.
STORED = ("/v1/files", "/v1/batches", "/v1/responses", "/v1/conversations", "/v1/uploads")
PROMPT_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
JSON_HEAD = (b"content-type", b"application/json")


class RouterApp:
    def __init__(
        self,
        settings: RouterSettings,
        upstreams: Sequence[Upstream],
        proxy: Proxy,
        prompts: PromptKeys,
        tickets: Tickets | None = None,
    ) -> None:
        self.settings, self.upstreams, self.proxy = settings, upstreams, proxy
        self.prompts, self.tickets = prompts, tickets
        self.is_draining = False
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            self.num_open += 1
            try:
                await self._serve(scope, receive, send)
            finally:
                self.num_open -= 1
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        is_own = path.startswith("/router/") or (method == "GET" and path in OWN)
        if is_own and not self.settings.is_transparent:
            return await self._own(scope, send)
        if self.is_draining:
            return await _refuse(send, 503, "the router is going away", "draining")
        asked = await self._asked(scope, receive)
        if asked is None:
            return None  # the client left in the middle of its body
        gone = asyncio.ensure_future(wait_gone(receive)) if asked.more is None else None
        work = asyncio.ensure_future(self._pass_on(asked, send))
        try:
            waiting = {work} if gone is None else {work, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                if task is not None and not task.done():
                    task.cancel()  # whoever left takes its request along
            with suppress(asyncio.CancelledError):
                await work
        return None

    # ------------------------------------------------------------ passing on

    async def _asked(self, scope: Scope, receive: Receive) -> Asked | None:
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        body, has_more = b"", True
        parts = []
        size = 0
        while has_more and size <= MOST_KEPT:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            has_more = message.get("more_body", False)
        body = b"".join(parts)
        path, query = scope["path"], scope.get("query_string", b"").decode("latin-1")
        raw = scope.get("raw_path") or path.encode()
        target = raw.decode("latin-1").partition("?")[0] + (f"?{query}" if query else "")
        is_stored = path.startswith(STORED)
        fields = None if has_more or path not in PROMPT_PATHS else _fields(body)
        return Asked(
            scope["method"],
            target,
            _forwarded(headers, scope),
            body,
            self._prompt(fields, headers),
            more=_rest(receive) if has_more else None,
            may_repeat=not is_stored or scope["method"] == "GET",
            needs_home=is_stored,
            fields=fields,
        )

    def _prompt(self, fields: dict[str, Any] | None, headers: Headers) -> Prompt:
        if self.settings.policy != "prefix" or fields is None:
            return Prompt()
        sizes = [one.index.page_size for one in self.upstreams if one.is_usable()]
        return self.prompts.prompt_of(fields, self._salt(fields, headers), max(sizes, default=0))

    def _salt(self, fields: dict[str, Any], headers: Headers) -> str:
        """As `server/completions.py` makes it, of a caller that is let in."""
        own, wanted = "", fields.get("cache_salt")
        given = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers}
        key = presented_key(given)
        if key and not self.settings.share_prefix_cache:
            found = KeyRing([key], []).caller(given)
            own = found.salt if found is not None else ""
        return f"{own}/{wanted}" if isinstance(wanted, str) and wanted else own

    async def _pass_on(self, asked: Asked, send: Send) -> None:
        if self.tickets is not None:
            asked = await self.tickets.with_ticket(asked)
        placed = await self.proxy.place(asked)
        if isinstance(placed, NotAnswered):
            return await _refuse(send, 503, f"no upstream answered: {placed}", "no_upstream")
        try:
            await self._copy(placed, send)
        finally:
            placed.answer.close()
            placed.place.leave()
        return None

    @staticmethod
    async def _copy(placed: Placed, send: Send) -> None:
        answer, place = placed.answer, placed.place
        headers = [*answer.headers, (b"x-quire-upstream", placed.upstream.name.encode())]
        is_stream = any(n == b"content-type" and b"event-stream" in v for n, v in headers)
        begun = False
        try:
            async for part in answer.chunks():
                if not begun:
                    place.first_byte(time.monotonic(), is_stream)
                    start = {"status": answer.status, "headers": headers}
                    await send({"type": "http.response.start", **start})
                    begun = True
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except (OSError, h11.RemoteProtocolError) as error:
            placed.upstream.num_failed += 1
            if not begun:
                return await _refuse(send, 502, f"{placed.upstream.name}: {error}", "upstream_lost")
            if is_stream:
                told = _problem(f"{placed.upstream.name} broke off: {error}", "upstream_lost")
                await send(
                    {
                        "type": "http.response.body",
                        "body": b"data: " + told + b"\n\n",
                        "more_body": False,
                    }
                )
                return None
            raise  # a whole answer that is cut must look cut
        if not begun:
            start = {"status": answer.status, "headers": headers}
            await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None

    # ------------------------------------------------------------ the router's own

    @property
    def _everyone(self) -> list[Upstream]:
        return [*self.upstreams, *(self.tickets.engines if self.tickets else ())]

    async def _own(self, scope: Scope, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in ("/health", "/live"):
            return await _reply(send, 200, {"status": "ok"})
        if path == "/ready":
            ready = not self.is_draining and any(one.is_usable() for one in self.upstreams)
            return await _reply(send, 200 if ready else 503, {"ready": ready})
        is_open = path == "/metrics" and self.settings.public_metrics
        if not is_open and not self._is_admin(scope):
            return await _refuse(send, 401, "this needs the admin key", "invalid_api_key")
        if path == "/metrics":
            text = metrics_text(self._everyone, self.proxy.num_retried)
            return await _send(send, 200, text, (b"content-type", b"text/plain; version=0.0.4"))
        if path == "/router/upstreams" and method == "GET":
            now = time.monotonic()
            return await _reply(send, 200, {"data": [one.shape(now) for one in self._everyone]})
        for verb, leaves in (("/router/drain/", True), ("/router/resume/", False)):
            if path.startswith(verb) and method == "POST":
                return await self._set_leaving(path.removeprefix(verb), leaves, send)
        return await _refuse(send, 404, f"there is no {method} {path}", "not_found")

    async def _set_leaving(self, name: str, leaves: bool, send: Send) -> None:
        for one in self._everyone:
            if one.name == name:
                one.is_leaving = leaves
                return await _reply(send, 200, one.shape(time.monotonic()))
        names = ", ".join(one.name for one in self._everyone)
        return await _refuse(
            send, 404, f"no upstream {name[:80]!r}; there are {names}", "not_found"
        )

    def _is_admin(self, scope: Scope) -> bool:
        if not self.settings.admin_key:
            return True
        given = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in scope["headers"]}
        return hmac.compare_digest(
            presented_key(given).encode("utf-8", "surrogatepass"), self.settings.admin_key.encode()
        )


OWN = frozenset(("/health", "/live", "/ready", "/metrics"))


def _fields(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None  # whoever gets it will say so
    return found if isinstance(found, dict) else None


async def _rest(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client left")
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _forwarded(headers: Headers, scope: Scope) -> Headers:
    client = scope.get("client")
    before = b", ".join(v for n, v in headers if n == b"x-forwarded-for")
    address = str(client[0]).encode() if client else b"unknown"
    kept = [(n, v) for n, v in headers if n not in (b"x-forwarded-for", *OWN_HEADERS)]
    return [*kept, (b"x-forwarded-for", before + b", " + address if before else address)]


def _problem(message: str, code: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": code, "code": code}}).encode()


async def _refuse(send: Send, status: int, message: str, code: str) -> None:
    await _send(send, status, _problem(message, code), JSON_HEAD)


async def _reply(send: Send, status: int, value: Any) -> None:
    await _send(send, status, json.dumps(value).encode(), JSON_HEAD)


async def _send(send: Send, status: int, body: bytes, kind: tuple[bytes, bytes]) -> None:
    headers = [kind, (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

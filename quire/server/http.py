"""HTTP as handlers see it: a request with its body read, and two kinds of answer.

The one place that speaks ASGI. Bodies are bounded in bytes and in time before a handler runs, and a
client that leaves cancels its handler, streaming or not, so that whatever the handler holds open is
released by its own `finally`. Routing and error bodies are `app.py`'s.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from quire.server.keys import Caller
from quire.server.outlet import Outlet
from quire.server.problems import Problem
from quire.server.settings import Limits

if TYPE_CHECKING:
    from quire.server.auto import Routed

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_HEADERS, MAX_HEADER_BYTES = 100, 64 << 10
MAX_QUERY_FIELDS = 32
DISCARD_S, DISCARD_TIMES = 3.0, 4  # of a refused body: seconds, and times the largest accepted one
JSON_TYPE = "application/json"
SSE_TYPE = "text/event-stream; charset=utf-8"
NDJSON_TYPE = "application/x-ndjson"
STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class HttpRequest:
    """One request, its body complete."""

    method: str
    path: str
    query: dict[str, str]
    headers: Mapping[str, str]
    id: str
    body: bytes = b""
    spool: Path | None = None  # a body that went to a file; removed when the exchange ends
    has_body: bool = False  # all of it was read, or there is no point in reading on
    num_held_bytes: int = 0  # of a `BodyRoom`
    caller: Caller | None = None
    is_background: bool = False  # a line of a batch: nobody waits, it takes what others leave
    with_answer: Callable[[sqlite3.Connection], bytes] | None = None  # of such a line: `keeping.py`
    client: tuple[str, int] | None = None  # address of the other end
    path_value: str = ""  # what a route's trailing {} matched
    adapter: str = ""  # that it named as its model
    route: Routed | None = None  # it left the choice of the model to us
    begun: float = field(default_factory=time.monotonic)
    sending_since: float | None = None  # a write the client has not taken yet
    deadline: float | None = None  # of what it generates; none before it was let in
    task: asyncio.Task[Any] | None = None
    kv_ticket: str = ""  # ends up in a response header: how another engine gets the pages
    warnings: list[str] = field(default_factory=list)  # end up in a response header
    answer_headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # are such headers
    notes: dict[str, str | int] = field(default_factory=dict)  # end up in the access log


@dataclass(slots=True)
class Reply:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(slots=True)
class EventStream:
    """Server-sent events, or lines of JSON; the first is awaited before the status line is sent.

    Errors before it are therefore ordinary error replies. `chunks` must clean up when closed.
    """

    chunks: AsyncIterator[bytes]
    failure: Callable[[Problem], bytes]  # an error in the midst of the stream, as an event
    content_type: str = SSE_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()
    outlet: Outlet = field(default_factory=Outlet)  # `chunks` may know and use it


class BodyRoom:
    """Bytes of bodies held at once, over all connections: many large ones are refused, not kept."""

    def __init__(self, most: int) -> None:
        self.most, self.num_bytes = most, 0

    def take(self, request: HttpRequest, count: int) -> None:
        if self.num_bytes + count > self.most:
            raise Problem(
                503, "too many large requests at once; try again", code="busy", retry_after_s=1
            )
        self.num_bytes += count
        request.num_held_bytes += count

    def release(self, request: HttpRequest) -> None:
        """The body was used up, or the request ended; once or more often."""
        self.num_bytes -= request.num_held_bytes
        request.num_held_bytes = 0


def read_head(scope: Scope, request_id: str) -> HttpRequest:
    headers: dict[str, str] = {}
    size = 0
    for name, value in scope["headers"]:
        size += len(name) + len(value)
        headers[name.decode("latin-1").lower()] = value.decode("latin-1")
    if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        raise Problem(
            431,
            f"got {len(scope['headers'])} headers of {size} bytes,"
            f" want at most {MAX_HEADERS} of {MAX_HEADER_BYTES}",
        )
    _check_framing(scope, headers)
    if len(scope["path"]) + len(scope.get("query_string", b"")) > MAX_HEADER_BYTES:
        raise Problem(414, f"the path and query have more than {MAX_HEADER_BYTES} bytes")
    try:
        text = scope.get("query_string", b"").decode("latin-1")
        query = dict(parse_qsl(text, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise Problem(400, f"want at most {MAX_QUERY_FIELDS} query fields") from None
    made = HttpRequest(scope["method"], scope["path"], query, headers, request_id)
    if client := scope.get("client"):
        made.client = (str(client[0]), int(client[1]))
    return made


def _check_framing(scope: Scope, headers: Mapping[str, str]) -> None:
    """Refuse what a proxy before us may have read otherwise than we do."""
    if "transfer-encoding" in headers:
        if "content-length" in headers:
            why = "got both Content-Length and Transfer-Encoding, want one of them"
            raise Problem(400, why, closes=True)
        if headers["transfer-encoding"].strip().lower() != "chunked":
            raise Problem(400, "want Transfer-Encoding: chunked or none", closes=True)
    if scope.get("http_version") == "1.1" and not headers.get("host"):
        raise Problem(400, "HTTP/1.1 needs a Host header")


async def read_body(
    request: HttpRequest, receive: Receive, limits: Limits, room: BodyRoom
) -> bytes:
    """Raises Problem 413, 415, 408 or 503; ClientGone when the client left in the middle."""
    body = bytearray()  # not a list: a body may come in millions of parts of a byte
    deadline = time.monotonic() + limits.body_total_s
    async for part in _parts(request, receive, limits, limits.max_body_bytes, deadline):
        room.take(request, len(part))
        body += part
    return bytes(body)


async def spool_body(request: HttpRequest, receive: Receive, limits: Limits) -> None:
    """As `read_body`, into `request.spool`; a slow upload has as long as it keeps coming."""
    assert request.spool is not None
    try:
        with request.spool.open("xb") as file:
            async for part in _parts(request, receive, limits, limits.max_file_bytes, math.inf):
                file.write(part)
    except OSError as error:
        raise Problem(507, f"the file cannot be stored: {error.strerror}") from None


async def _parts(
    request: HttpRequest, receive: Receive, limits: Limits, most: int, deadline: float
) -> AsyncIterator[bytes]:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "compressed bodies are not accepted; send it plain")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise _too_large(declared[:20], most)
    size = 0
    while True:
        patience = min(limits.body_idle_s, deadline - time.monotonic())
        try:
            message = await asyncio.wait_for(receive(), max(0.0, patience))
        except TimeoutError:
            request.has_body = True
            raise Problem(408, "the body did not arrive in time") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(f"over {most}", most)
        is_last = not message.get("more_body", False)
        if is_last:
            request.has_body = True
        yield part
        if is_last:
            return


def check_values(body: bytes, limits: Limits) -> None:
    """Refuse a large body that is mostly brackets: parsing it would hold up everyone for seconds.

    Counts what is within strings too, which only errs on a text of that many brackets.
    """
    if len(body) <= limits.max_json_values:
        return
    count = body.count(b"[") + body.count(b"{") + body.count(b'":')
    if count > limits.max_json_values:
        raise Problem(
            413,
            f"got {count} lists, objects and keys in one body, want at most"
            f" {limits.max_json_values}",
            code="too_large",
        )


async def discard_body(request: HttpRequest, receive: Receive, limits: Limits) -> None:
    """Let a client we refuse finish sending, within reason: one that is cut off in the middle sees
    a broken connection and never our answer."""
    if "expect" in request.headers:
        return  # it is waiting for our word before it sends anything
    size, deadline = 0, time.monotonic() + DISCARD_S
    while size <= DISCARD_TIMES * limits.max_body_bytes:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _too_large(size: str, most: int) -> Problem:
    return Problem(413, f"got a body of {size} bytes, want at most {most}", code="too_large")


class ClientGone(Exception):
    """Nobody is there to answer."""


async def wait_gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_reply(reply: Reply, send: Send, extra: list[tuple[bytes, bytes]]) -> None:
    headers = [
        (b"content-type", reply.content_type.encode()),
        (b"content-length", str(len(reply.body)).encode()),
        *reply.headers,
        *extra,
    ]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": False})


async def send_stream(
    request: HttpRequest,
    stream: EventStream,
    send: Send,
    extra: Callable[[], list[tuple[bytes, bytes]]],
) -> None:
    """Pump chunks to the client. What fails before the first chunk is raised."""
    chunks = stream.chunks
    try:
        first = await anext(chunks)
        kind = (b"content-type", stream.content_type.encode())
        headers = [kind, *STREAM_HEADERS, *stream.headers, *extra()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream.outlet.open(request, send)
        if (rest := stream.outlet.write(first)) is not None:
            await rest
        async for chunk in chunks:
            if (rest := stream.outlet.write(chunk)) is not None:
                await rest
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


async def end_stream(send: Send, last: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": last, "more_body": False})

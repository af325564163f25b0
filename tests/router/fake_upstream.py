"""A server that does what it is told: for what happens between a router and those behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

Writer = asyncio.StreamWriter
Behaviour = Callable[[bytes, Writer], Awaitable[None]]


def whole(body: bytes, status: int = 200, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass
class FakeUpstream:
    """Answers `/ready` and `/admin/cache_news`, and everything else as `behaviour` says."""

    name: str
    behaviour: Behaviour | None = None
    news: bytes | None = None
    is_ready: bool = True
    seen: list[bytes] = field(default_factory=list)  # bodies of requests
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[Writer] = field(default_factory=set)

    async def start(self) -> FakeUpstream:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self._writers.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        size = int(line.split(b":")[1])
                body = await reader.readexactly(size)
                await self._answer(head, body, writer)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: Writer) -> None:
        path = head.split(b" ")[1]
        if path == b"/ready":
            writer.write(whole(b"{}", 200 if self.is_ready else 503))
        elif path.startswith(b"/admin/cache_news"):
            writer.write(whole(self.news) if self.news else whole(b"{}", 404))
        else:
            self.seen.append(body)
            if self.behaviour is not None:
                await self.behaviour(body, writer)
            else:
                writer.write(whole(json.dumps({"by": self.name}).encode()))


async def break_off(body: bytes, writer: Writer) -> None:
    """Two events of a stream, and gone."""
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    writer.write(head + b"b\r\ndata: one\n\n\r\n")
    await writer.drain()
    writer.transport.abort()


async def hang_up(body: bytes, writer: Writer) -> None:
    """Reads the request and closes."""
    writer.transport.abort()


def says(status: int) -> Behaviour:
    async def answer(body: bytes, writer: Writer) -> None:
        writer.write(whole(b'{"error": {}}', status))

    return answer

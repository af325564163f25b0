"""HTTP by hand over sockets: for requests no decent client would send, and for many at once."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


def request_bytes(
    path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str = "POST"
) -> bytes:
    """A well-formed request; `body` as it is when bytes, else as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Host": "test", "Content-Type": "application/json", "Content-Length": str(len(data))}
    lines |= headers or {}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return head.encode("latin-1") + b"\r\n" + data


def dial(port: int, timeout: float = 15.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout)


def exchange(port: int, data: bytes, timeout: float = 15.0) -> tuple[int, bytes]:
    """Send bytes, read until the server has answered or closed; status 0 when it only closed."""
    with dial(port, timeout) as connection:
        with suppress(OSError):  # it closed early; there may be an answer all the same
            connection.sendall(data)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """One answer with a Content-Length, or all there is until the other side closes."""
    got = b""
    try:
        while not _is_complete(got):
            part = connection.recv(65_536)
            if not part:
                break
            got += part
    except ConnectionError:
        pass
    if not got.startswith(b"HTTP/"):
        return 0, got
    return int(got.split(b" ", 2)[1]), got


def _is_complete(got: bytes) -> bool:
    head, found, body = got.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return False


@dataclass
class Stream:
    """One streamed answer, as far as it came."""

    status: int = 0
    num_events: int = 0  # with text
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0  # by the usage at the end, when asked for
    is_done: bool = False
    seconds: float = 0.0


class StreamClient:
    """One request over a socket of its own; read as much of its stream as you like."""

    def __init__(
        self, port: int, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        self.port, self._data = port, request_bytes(path, options | body, headers=headers)
        self.seen = Stream()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def local_port(self) -> int:
        assert self._writer is not None
        return int(self._writer.get_extra_info("sockname")[1])

    async def open(self) -> None:
        """Send the request and read the head of the answer."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writer.write(self._data)
        await self._writer.drain()
        line = await self._reader.readline()
        self.seen.status = int(line.split(b" ")[1]) if line.startswith(b"HTTP/") else 0
        while (await self._reader.readline()).strip():
            pass

    async def read(self, events: int | None = None) -> Stream:
        """So many events with text, or all until the stream ends."""
        assert self._reader is not None
        begun, wanted = time.monotonic(), events
        if self.seen.status != 200:
            return self.seen
        while wanted is None or self.seen.num_events < wanted:
            try:
                line = await self._reader.readline()
            except ConnectionError:
                break
            if not line.endswith(b"\n"):
                break  # the end, or where a death cut an event in two
            if self._take(line.strip()):
                break
        self.seen.seconds += time.monotonic() - begun
        return self.seen

    def _take(self, line: bytes) -> bool:
        """True when the stream is over."""
        if not line.startswith(b"data: "):
            return line == b"0"  # the last chunk
        if line == b"data: [DONE]":
            self.seen.is_done = True
            return False
        event = json.loads(line[6:])
        if "error" in event:
            self.seen.errors.append(event["error"])
        elif event.get("choices"):
            self.seen.num_events += 1
        elif event.get("usage"):
            self.seen.num_tokens = event["usage"]["completion_tokens"]
        return False

    async def run(self) -> Stream:
        """From the request to the end of the answer."""
        await self.open()
        return await self.read()

    def hang_up(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

"""HTTP/1.1 as a router needs it: heads are read and written, bodies passed on as they are.

One request a connection, to keep what is forwarded unambiguous: a body has a length or there is
none, and connections close at their end. Bounds are on everything that is held in memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD, MAX_BODY = 64 << 10, 8 << 20
HEAD_S, BODY_S = 10.0, 60.0
HOP = ("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade", "expect")


class BadMessage(Exception):
    """What came is no request or answer that can be passed on; carries a status for the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Head:
    """A start line, and headers by their lower-case names."""

    start: str
    headers: dict[str, str]

    def encode(self) -> bytes:
        lines = [self.start, *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@dataclass(slots=True)
class Request:
    head: Head
    body: bytes = b""
    values: dict[str, Any] | None = field(default=None)  # the body, where it is a JSON object

    @property
    def method(self) -> str:
        return self.head.start.split(" ", 1)[0]

    @property
    def path(self) -> str:
        return self.head.start.split(" ")[1].partition("?")[0]

    def to(self, host: str, extra: Mapping[str, str], body: bytes | None = None) -> bytes:
        """As bytes for another server; headers of this router's own are never a client's."""
        kept = {
            name: value
            for name, value in self.head.headers.items()
            if name not in HOP and not name.startswith("x-quire-")
        }
        sent = self.body if body is None else body
        kept |= {"host": host, "connection": "close", **extra}
        if sent or self.method in ("POST", "PUT", "PATCH"):
            kept["content-length"] = str(len(sent))
        return Head(self.head.start, kept).encode() + sent


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Raises BadMessage, or EOFError when nothing came at all."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise EOFError from None
        raise BadMessage(400, "the head of the message is not complete") from None
    except asyncio.LimitOverrunError:
        raise BadMessage(431, f"the head is longer than {MAX_HEAD} bytes") from None
    start, *lines = raw[:-4].decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        is_twice = name in headers and name in ("content-length", "transfer-encoding", "host")
        if not colon or not name or name != name.strip() or is_twice:
            raise BadMessage(400, f"got the header {line[:80]!r}, want 'name: value', once")
        headers[name] = value.strip()
    return Head(start, headers)


async def read_request(reader: asyncio.StreamReader) -> Request:
    async with asyncio.timeout(HEAD_S):
        head = await read_head(reader)
    words = head.start.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadMessage(400, f"got {head.start[:80]!r}, want 'METHOD /path HTTP/1.1'")
    if "transfer-encoding" in head.headers:
        raise BadMessage(411, "a body needs a Content-Length here")
    length = head.headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal():
        raise BadMessage(400, f"got Content-Length {length[:40]!r}, want a number")
    if int(length) > MAX_BODY:
        raise BadMessage(413, f"got a body of {length} bytes, want at most {MAX_BODY}")
    async with asyncio.timeout(BODY_S):
        body = await reader.readexactly(int(length))
    return Request(head, body, _object(body))


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None  # for the engine to complain about
    return values if isinstance(values, dict) else None


def refusal(status: int, text: str) -> bytes:
    body = json.dumps({"error": {"message": text, "type": "router_error", "code": status}}).encode()
    head = Head(
        f"HTTP/1.1 {status} {'Bad Gateway' if status == 502 else 'Refused'}",
        {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        },
    )
    return head.encode() + body

"""One exchange with the app at the level of ASGI messages, so that tests decide what the other end
does between any two of them: send slowly, stop reading, leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from quire.server.app import App


class Call:
    """A request to the app. `send_body` and `leave` act as the client; `read` is what it got."""

    def __init__(
        self, app: App, method: str, path: str, headers: dict[str, str] | None = None
    ) -> None:
        head = {"host": "127.0.0.1", "content-type": "application/json"} | (headers or {})
        path, _, query = path.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "query_string": query.encode("latin-1"),
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in head.items()],
        }
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.num_writes = 0  # of parts of the body
        self.is_over = False
        self.can_write = asyncio.Event()
        self.can_write.set()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.ensure_future(app(self.scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.can_write.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode("latin-1") for k, v in message["headers"]}
        else:
            self.num_writes += 1
            self.body += message.get("body", b"")
            self.is_over = not message.get("more_body", False)

    def send_body(self, body: Any, more: bool = False) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._inbox.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, text: bytes, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while text not in self.body:
                await asyncio.sleep(0.001)

    async def end(self, seconds: float = 5.0) -> Call:
        await asyncio.wait_for(self.task, seconds)
        return self

    def json(self) -> Any:
        return json.loads(self.body)


async def call(app: App, method: str, path: str, body: Any = b"", **headers: str) -> Call:
    """A whole exchange; header names may be written with underscores."""
    made = Call(app, method, path, {k.replace("_", "-"): v for k, v in headers.items()})
    made.send_body(body)
    return await made.end()

"""GET /inside: the engine at work as a stream of pictures, at most ten a second.

The engine draws pictures only while somebody watches, at the pace of the fastest watcher; all
watchers share them. Texts of cached prefixes are shown only where there is a single owner: on a
server without keys, or to an admin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from quire.errors import BadRequest
from quire.server import sse
from quire.server.http import EventStream, HttpRequest
from quire.server.server import Server

MIN_HZ, MAX_HZ = 0.01, 10.0
MAX_WATCHERS = 32
HEAD_TOKENS = 24


class Inside:
    """The latest picture, and who is watching."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._watchers: dict[int, float] = {}
        self._hz = 0.0
        self._picture: dict[str, Any] = {}
        server.link.on_picture.append(self._take)
        server.link.on_hello.append(lambda hello: self._ask(force=True))

    def _take(self, picture: dict[str, Any]) -> None:
        self._picture = picture

    def enter(self, watcher: object, hz: float) -> None:
        self._watchers[id(watcher)] = hz
        self._ask()

    def leave(self, watcher: object) -> None:
        self._watchers.pop(id(watcher), None)
        self._ask()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def _ask(self, force: bool = False) -> None:
        wanted = max(self._watchers.values(), default=0.0)
        if wanted != self._hz or (force and wanted):
            self._hz = wanted
            self.server.link.watch(wanted)

    async def picture(self, with_text: bool) -> dict[str, Any]:
        server = self.server
        counted = await server.all_metrics()
        body: dict[str, Any] = {
            "model": server.model_names[0],
            "uptime_s": round(time.monotonic() - server.begun, 1),
            "ready": server.link.why_not_ready() is None,
            "api": counted.live(),
            "spec": None,
        }
        if not body["ready"]:
            return body
        body |= self._picture
        if "tree" in body:
            body["tree"] = [self._node(node, with_text) for node in body["tree"]]
        return body

    def _node(self, node: dict[str, Any], with_text: bool) -> dict[str, Any]:
        shown = {key: value for key, value in node.items() if key != "head"}
        if with_text and node.get("head"):
            shown["text"] = self.server.tokenizer.decode(
                node["head"][:HEAD_TOKENS], skip_special_tokens=False
            )
        return shown


async def inside(request: HttpRequest, server: Server) -> EventStream:
    try:
        hz = float(request.query.get("hz", "5"))
    except ValueError:
        hz = -1.0
    if not MIN_HZ <= hz <= MAX_HZ:
        got = request.query.get("hz", "")[:40]
        raise BadRequest(f"got hz={got!r}, want {MIN_HZ:g} to {MAX_HZ:g}", param="hz")
    assert server.inside is not None
    if server.inside.num_watchers >= MAX_WATCHERS:
        raise BadRequest(f"{MAX_WATCHERS} are watching already; close another page")
    return EventStream(_pictures(request, server.inside, hz), sse.failure)


async def _pictures(request: HttpRequest, inside: Inside, hz: float) -> AsyncIterator[bytes]:
    caller = request.caller
    with_text = caller is not None and caller.is_admin
    inside.enter(request, hz)
    try:
        while True:
            yield sse.data(await inside.picture(with_text))
            await asyncio.sleep(1.0 / hz)
    finally:
        inside.leave(request)

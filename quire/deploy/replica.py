"""EngineReplica: what Ray Serve runs, one for each replica: a whole `quire serve`, and a way to it.

    Ray's proxy ── this actor ── quire serve, on a port that this machine alone can reach

The server has its supervisor, so an engine that dies is brought back inside; Ray replaces the whole
when that takes too long. Requests pass as the router passes them (`router/app.py`), streams and
hang-ups included. A replica exists for Ray once its engine is ready. Ray lets it finish what it has
before it is ended. Ray itself is not imported here.
"""

from __future__ import annotations

import asyncio
import platform
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from quire import env
from quire.deploy.first_tokens import LateFirstTokens
from quire.deploy.settings import ReplicaSettings
from quire.errors import BadRequest, EngineDead
from quire.router.app import RouterApp
from quire.router.choose import Chooser
from quire.router.crew import Crew
from quire.router.http_client import NotAnswered
from quire.router.prompt_keys import TextKeys
from quire.router.proxy import Proxy
from quire.router.replicas import Replica, admin_key_for, free_ports, serve_line
from quire.router.settings import RouterSettings, UpstreamAddress
from quire.server.http import Receive, Scope, Send

NAME = "engine"
POLL_S = 0.1
AWAY_S = 90.0  # without being ready, after which Ray shall replace it
METRICS_S = 2.0
END_S = 10.0
GOOD = 200
KEY_FILE = "--api-key-file"


class EngineReplica:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: fields of ReplicaSettings. Nothing runs before `begin`."""
        self.settings = msgspec.convert(dict(settings), ReplicaSettings)
        self.child: Replica | None = None
        self._late = LateFirstTokens(self.settings.target_ttft_s)

    async def begin(self) -> None:
        """Returns when the engine is ready. Raises BadRequest, or EngineDead."""
        key = env.admin_key() or admin_key_for(self._has_keys())
        (port,) = free_ports(1)
        words = (*self.settings.words, "--drain-timeout", str(self.settings.drain_s))
        self.child = Replica(NAME, port, serve_line(words, port), env.of_child(key))
        self.child.start()
        router = RouterSettings(
            upstreams=(UpstreamAddress(NAME, "127.0.0.1", port),),
            policy="least-loaded",
            admin_key=key,
            is_transparent=True,
        )
        self._admin = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._crew = crew = Crew(router.upstreams, router)
        (self.upstream,) = crew.upstreams
        proxy = Proxy(crew.upstreams, crew.clients, Chooser(router.policy), 1, router.head_s)
        self._app = BelowRoute(RouterApp(router, crew.upstreams, proxy, TextKeys()))
        while not self.upstream.is_usable():
            if not self.child.is_running():
                await crew.close()
                raise EngineDead(f"quire serve {' '.join(self.settings.words)} did not start")
            await asyncio.sleep(POLL_S)
        self._seen_ready = time.monotonic()

    def _has_keys(self) -> bool:
        """As its server will. One without keys takes everybody for an administrator."""
        from_file = any(word.partition("=")[0] == KEY_FILE for word in self.settings.words)
        if not from_file and env.api_key() is None:
            if self.settings.needs_key:
                raise BadRequest(
                    f"Ray listens beyond this machine and the replica on {platform.node()} has no"
                    " API key: give --api-key-file, or set QUIRE_API_KEY where Ray's nodes are"
                    " started, or --allow-unauthenticated if that is meant"
                )
            return False
        return True

    # ------------------------------------------------------------ as Ray calls it

    async def __serve_build_asgi_app__(self) -> Any:
        """After `__init__`, before the replica counts as one."""
        await self.begin()
        return self._app

    async def check_health(self) -> None:
        """Raises EngineDead when Ray shall make another in its place."""
        now = time.monotonic()
        if self.child is None or not self.child.is_running():
            raise EngineDead("quire serve has ended")
        if self.upstream.is_usable():
            self._seen_ready = now
        away = now - self._seen_ready
        if away > AWAY_S:
            raise EngineDead(f"not ready for {away:.0f} s: {self.upstream.reason}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `scaling.py`, besides the open requests that Ray counts itself."""
        return {"late_share": self._late.share(await self._metrics())}

    def __del__(self) -> None:  # Ray calls it when nothing is under way any more
        if (child := self.child) is not None and child.process is not None and child.is_running():
            child.stop()
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(END_S)
            child.stop(signal.SIGKILL)

    async def _metrics(self) -> str:
        """Empty where the server does not answer."""
        if not self.settings.target_ttft_s:
            return ""
        client = self._crew.clients[NAME]
        try:
            answer = await client.send("GET", "/metrics", self._admin, head_s=METRICS_S)
            body = await answer.body()
        except (NotAnswered, OSError):
            return ""
        answer.close()
        return body.decode() if answer.status == GOOD else ""


class BelowRoute:
    """An app that knows nothing of the route that Ray gave it."""

    def __init__(self, app: RouterApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(without_root(scope), receive, send)


def without_root(scope: Scope) -> Scope:
    """The path below the route, as the server knows it."""
    root = scope.get("root_path", "")
    if scope["type"] != "http" or not root or not scope["path"].startswith(root):
        return scope
    raw = scope.get("raw_path") or scope["path"].encode()
    below = raw.removeprefix(root.encode()) or b"/"
    return {**scope, "path": scope["path"][len(root) :] or "/", "raw_path": below, "root_path": ""}

"""Watchers: one task for each upstream that asks whether it is ready and what its cache holds.

An upstream is up when it says so: by `/ready`, or `/health` or `/v1/models` where a server has no
such path. Of one that publishes its cache the changes are asked for after every look; a gap is
answered with the whole list, so a missed change cannot last.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from quire.obs.log import log_event
from quire.router.http_client import HttpClient, NotAnswered
from quire.router.prefix_index import CacheNews
from quire.router.settings import RouterSettings
from quire.router.upstream import State, Upstream

LOOK_S = 3.0  # for an answer to one look
FAILURES = 2  # looks in a row without an answer: it is down
READY_PATHS = ("/ready", "/health", "/v1/models")
NOT_FOUND = 404
NO_NEWS_S = 30.0  # until a server that publishes nothing is asked again


class Watcher:
    def __init__(self, upstream: Upstream, client: HttpClient, settings: RouterSettings) -> None:
        self.upstream, self.client, self.settings = upstream, client, settings
        self._headers: list[tuple[bytes, bytes]] = []
        if settings.admin_key:
            self._headers = [(b"authorization", f"Bearer {settings.admin_key}".encode())]
        self._path = 0
        self._failures = 0
        self._no_news_before = 0.0

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.settings.watch_s)

    async def look(self) -> None:
        reason = await self._reason()
        upstream = self.upstream
        if reason:
            self._failures += 1
            is_new = upstream.state is State.UP
            if self._failures >= FAILURES or not is_new:
                upstream.went_down(reason)
                if is_new:
                    _warn("upstream_down", upstream, reason)
            return
        self._failures = 0
        if upstream.state is not State.UP:
            self._no_news_before = 0.0
            upstream.came_up()
            log_event("upstream_up", upstream=upstream.name)
        if self.settings.policy == "prefix" and self.settings.tokenizer:
            await self._hear()  # else prompts have no keys that it could publish

    async def _reason(self) -> str:
        """Why it is not ready; empty: it is."""
        status = NOT_FOUND
        while True:
            try:
                status = await self._status(READY_PATHS[self._path])
            except NotAnswered as error:
                return str(error)
            if status != NOT_FOUND or self._path == len(READY_PATHS) - 1:
                break
            self._path += 1
        # A server that wants a key of us is there.
        is_ready = status < 300 or status in (401, 403)
        return "" if is_ready else f"{READY_PATHS[self._path]} says {status}"

    async def _status(self, path: str) -> int:
        answer = await self.client.send("GET", path, self._headers, head_s=LOOK_S)
        try:
            await asyncio.wait_for(answer.body(), LOOK_S)
        except Exception as error:
            raise NotAnswered(f"{self.upstream.name}: {error}", was_sent=True) from None
        finally:
            answer.close()
        return answer.status

    async def _hear(self) -> None:
        now = time.monotonic()
        if now < self._no_news_before:
            return
        index = self.upstream.index
        try:
            news = await self._news(index.epoch, index.next)
            if news is not None and not index.take(news, time.monotonic()):
                news = await self._news("", 0)
                if news is not None:
                    index.take(news, time.monotonic())
        except (NotAnswered, msgspec.MsgspecError, ValueError) as error:
            _warn("cache_news_lost", self.upstream, str(error))
            news = None
        if news is None and not index.is_published:
            self._no_news_before = now + NO_NEWS_S

    async def _news(self, epoch: str, since: int) -> CacheNews | None:
        """None: it publishes nothing, or not to us."""
        path = f"/admin/cache_news?epoch={epoch}&since={since}"
        answer = await self.client.send("GET", path, self._headers, head_s=LOOK_S)
        try:
            body = await asyncio.wait_for(answer.body(), LOOK_S)
        except Exception as error:
            raise NotAnswered(f"{self.upstream.name}: {error}", was_sent=True) from None
        finally:
            answer.close()
        return msgspec.json.decode(body, type=CacheNews) if answer.status == 200 else None


def _warn(event: str, upstream: Upstream, reason: str) -> None:
    log_event(event, severity=logging.WARNING, upstream=upstream.name, reason=reason)

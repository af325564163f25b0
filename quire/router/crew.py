"""Crew: upstreams of one kind, with a connection and a watcher each. Its list changes in place.

    --upstream http://host:8000        one server, for good
    --upstream dns+http://name:8000    one for each address of the name, asked for every two seconds

An address that appears is an upstream from then on. One that is gone gets nothing more and is
forgotten after its last answer. A name that cannot be resolved changes nothing: whether those that
are known live is the watchers' business (`watch.py`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from quire.obs.log import log_event
from quire.router.http_client import HttpClient
from quire.router.settings import RouterSettings, UpstreamAddress
from quire.router.upstream import Upstream
from quire.router.watch import Watcher

RESOLVE_S = 2.0
Resolve = Callable[[UpstreamAddress], Awaitable[list[str]]]


async def addresses_of(name: UpstreamAddress) -> list[str]:
    """Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class Crew:
    def __init__(
        self,
        addresses: Sequence[UpstreamAddress],
        settings: RouterSettings,
        resolve: Resolve = addresses_of,
    ) -> None:
        self.settings, self._resolve = settings, resolve
        self.upstreams: list[Upstream] = []
        self.clients: dict[str, HttpClient] = {}
        self.broke: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gone: list[Upstream] = []  # whose addresses are no more, with answers under way
        for address in addresses:
            if address.is_many:
                self._start(address.name, self._follow(address))
            else:
                self._add(address)

    # ------------------------------------------------------------ one by one

    def _add(self, address: UpstreamAddress) -> None:
        upstream = Upstream(address)
        self.upstreams.append(upstream)
        client = self.clients[address.name] = HttpClient(address, self.settings.connect_s)
        self._start(address.name, Watcher(upstream, client, self.settings).run())

    def _remove(self, upstream: Upstream) -> None:
        self.upstreams.remove(upstream)
        self._tasks.pop(upstream.name).cancel()
        self.clients.pop(upstream.name).close()
        log_event("upstream_forgotten", upstream=upstream.name)

    def _start(self, name: str, work: Awaitable[None]) -> None:
        task = self._tasks[name] = asyncio.ensure_future(work)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """None of them ends by itself; a router that no longer looks is worse than none."""
        if not task.cancelled() and not self.broke.done():
            self.broke.set_result(repr(task.exception()))

    # ------------------------------------------------------------ by name

    async def _follow(self, name: UpstreamAddress) -> None:
        was_lost = False
        while True:
            try:
                self.take(name, await self._resolve(name))
                was_lost = False
            except OSError as error:
                if not was_lost:
                    why = {"name": name.name, "reason": str(error)}
                    log_event("name_not_resolved", severity=logging.WARNING, **why)
                was_lost = True
            self._forget_idle()
            await asyncio.sleep(RESOLVE_S)

    def take(self, name: UpstreamAddress, hosts: Sequence[str]) -> None:
        """What the name stands for now."""
        wanted = {_named(host, name.port): host for host in hosts}
        known = {one.name: one for one in self.upstreams if one.address.behind == name.name}
        for label, host in wanted.items():
            if label not in self.clients:
                added = replace(name, name=label, host=host, is_many=False, behind=name.name)
                self._add(added)
            elif (back := known.get(label)) in self._gone and back is not None:
                self._gone.remove(back)
                back.is_leaving = False
        for label, one in known.items():
            if label not in wanted and one not in self._gone:
                self._gone.append(one)
                one.is_leaving = True

    def _forget_idle(self) -> None:
        for one in [one for one in self._gone if not one.num_open]:
            self._gone.remove(one)
            self._remove(one)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        for client in self.clients.values():
            client.close()


def _named(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

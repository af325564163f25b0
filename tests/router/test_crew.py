"""Servers that are found by a name: whoever appears is asked, whoever goes may finish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.errors import BadRequest
from quire.router import crew as crew_file
from quire.router.choose import Chooser, Prompt
from quire.router.crew import Crew
from quire.router.proxy import Asked, Placed, Proxy
from quire.router.settings import RouterSettings, UpstreamAddress
from tests.router.fake_upstream import FakeUpstream

MANY = UpstreamAddress.parse("dns+http://engines:8000")


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20.0))


async def reached(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.01)


def test_how_a_name_is_written() -> None:
    """Red when a name of many servers is taken for one server, or the other way round."""
    assert MANY.is_many and (MANY.host, MANY.port) == ("engines", 8000)
    assert not UpstreamAddress.parse("http://engines:8000").is_many
    assert UpstreamAddress.parse("pool=dns+http://engines:80").name == "pool"
    with pytest.raises(BadRequest, match="certificate"):
        UpstreamAddress.parse("dns+https://engines")


def test_addresses_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a pod that was added gets no request, or one that leaves loses its answers."""
    monkeypatch.setattr(crew_file, "RESOLVE_S", 0.01)

    async def work() -> None:
        server = await FakeUpstream("a").start()
        hosts = ["127.0.0.1"]

        async def resolve(name: UpstreamAddress) -> list[str]:
            if not hosts:
                raise OSError("no such name")
            return list(hosts)

        address = UpstreamAddress("engines", "engines", server.port, is_many=True)
        settings = RouterSettings(upstreams=(address,), policy="round-robin", watch_s=0.01)
        crew = Crew(settings.upstreams, settings, resolve)
        proxy = Proxy(crew.upstreams, crew.clients, Chooser("round-robin"), 3, 5.0)
        await reached(lambda: any(one.is_usable() for one in crew.upstreams))

        asked = Asked("POST", "/v1/completions", [], b"{}", Prompt())
        placed = await proxy.place(asked)
        assert isinstance(placed, Placed) and placed.answer.status == 200
        hosts[:] = ["127.0.0.2"]  # another one in its place
        await reached(lambda: len(crew.upstreams) == 2 and placed.upstream.is_leaving)
        assert not placed.upstream.is_usable()
        hosts[:] = ["127.0.0.1", "127.0.0.2"]  # it was there all the time
        await reached(lambda: placed.upstream.is_usable())
        hosts[:] = ["127.0.0.2"]
        await reached(lambda: placed.upstream.is_leaving)
        assert await placed.answer.body() == b'{"by": "a"}'
        placed.answer.close()
        placed.place.leave()
        await reached(lambda: [one.address.host for one in crew.upstreams] == ["127.0.0.2"])
        assert list(crew.clients) == [f"127.0.0.2:{server.port}"]
        hosts.clear()  # the name server is away
        await asyncio.sleep(0.05)
        assert len(crew.upstreams) == 1 and not crew.broke.done()
        await crew.close()
        await server.stop()

    run(work)


def test_a_real_name_is_resolved() -> None:
    """Red when addresses are read from the wrong place of an answer."""

    async def work() -> None:
        name = UpstreamAddress("here", "localhost", 8000, is_many=True)
        assert {"127.0.0.1", "::1"} & set(await crew_file.addresses_of(name))

    run(work)


def test_a_watcher_that_ends_is_told() -> None:
    """Red when the router goes on while nobody looks at its servers any more."""

    async def work() -> None:
        async def resolve(name: UpstreamAddress) -> list[str]:
            raise ZeroDivisionError

        crew = Crew((MANY,), RouterSettings(upstreams=(MANY,)), resolve)
        assert "ZeroDivisionError" in await crew.broke
        await crew.close()

    run(work)

"""A router between clients and servers that fail in every way, in one process over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from quire.router.app import RouterApp
from quire.router.choose import Chooser
from quire.router.http_client import HttpClient
from quire.router.prompt_keys import TextKeys
from quire.router.proxy import Proxy
from quire.router.settings import RouterSettings, UpstreamAddress
from quire.router.upstream import Upstream
from quire.router.watch import Watcher
from tests.router.fake_upstream import FakeUpstream, Writer, break_off, hang_up, says, whole

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


class Talk:
    """One exchange with the app, as an ASGI server would have it."""

    def __init__(self, app: RouterApp) -> None:
        self.app, self.status, self.body = app, 0, b""
        self.headers: dict[bytes, bytes] = {}
        self.leaves = asyncio.Event()

    async def ask(
        self, path: str, body: bytes = CHAT, method: str = "POST", headers: Any = ()
    ) -> Talk:
        parts = [body[at : at + 3_000_000] for at in range(0, len(body), 3_000_000)] or [b""]

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await self.leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status, self.headers = message["status"], dict(message["headers"])
            else:
                self.body += message.get("body", b"")

        length = (b"content-length", str(len(body)).encode())
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [length, *headers],
            "query_string": b"",
            "client": ("10.1.2.3", 5),
        }
        await self.app(scope, receive, send)
        return self

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@asynccontextmanager
async def routed(
    *fakes: FakeUpstream, policy: Any = "round-robin", key: str = ""
) -> AsyncIterator[RouterApp]:
    for fake in fakes:
        await fake.start()
    addresses = tuple(UpstreamAddress(f.name, "127.0.0.1", f.port) for f in fakes)
    settings = RouterSettings(upstreams=addresses, policy=policy, admin_key=key, head_s=5.0)
    upstreams = [Upstream(address) for address in addresses]
    clients = {one.name: HttpClient(one.address, 1.0) for one in upstreams}
    proxy = Proxy(upstreams, clients, Chooser(policy), 3, 5.0)
    for one in upstreams:
        await Watcher(one, clients[one.name], settings).look()
    try:
        yield RouterApp(settings, upstreams, proxy, TextKeys())
    finally:
        for client in clients.values():
            client.close()
        for fake in fakes:
            await fake.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20.0))


def test_requests_go_round_and_connections_are_kept() -> None:
    async def work() -> None:
        a, b = FakeUpstream("a"), FakeUpstream("b")
        async with routed(a, b) as app:
            told = [(await Talk(app).ask("/v1/completions")) for _ in range(6)]
            assert [t.status for t in told] == [200] * 6
            assert sorted(t.json["by"] for t in told) == ["a"] * 3 + ["b"] * 3
            assert all(t.headers[b"x-quire-upstream"].decode() == t.json["by"] for t in told)
            assert all(len(c._idle) == 1 for c in app.proxy.clients.values())
            assert all(one.num_open == one.pending_tokens == 0 for one in app.upstreams)

    run(work)


@pytest.mark.parametrize("wrong", [hang_up, says(503), says(429), says(502)])
def test_what_was_not_answered_goes_to_the_next(wrong: Any) -> None:
    """Red when a client sees the failure of an upstream that another could make good."""

    async def work() -> None:
        a, b = FakeUpstream("a", wrong), FakeUpstream("b")
        async with routed(a, b) as app:
            for _ in range(4):
                assert (await Talk(app).ask("/v1/completions")).json == {"by": "b"}
            assert app.proxy.num_retried >= 1
            assert all(one.num_open == one.pending_tokens == 0 for one in app.upstreams)

    run(work)


def test_when_nobody_can_the_last_word_is_passed_on() -> None:
    async def work() -> None:
        a, b = FakeUpstream("a", says(429)), FakeUpstream("b", says(429))
        async with routed(a, b) as app:
            assert (await Talk(app).ask("/v1/completions")).status == 429
            assert len(a.seen) == len(b.seen) == 1
        async with routed(FakeUpstream("a", is_ready=False)) as app:
            told = await Talk(app).ask("/v1/completions")
            assert told.status == 503 and told.json["error"]["code"] == "no_upstream"
            assert (await Talk(app).ask("/ready", b"", "GET")).status == 503

    run(work)


def test_a_dead_upstream_is_left_out_and_comes_back() -> None:
    async def work() -> None:
        a, b = FakeUpstream("a"), FakeUpstream("b")
        async with routed(a, b) as app:
            await a.stop()
            for _ in range(4):
                assert (await Talk(app).ask("/v1/completions")).json == {"by": "b"}
            dead = next(one for one in app.upstreams if one.name == "a")
            assert dead.num_failed <= 2 and not dead.is_usable()
            await a.start()
            await Watcher(dead, app.proxy.clients["a"], app.settings).look()
            said = [(await Talk(app).ask("/v1/completions")).json["by"] for _ in range(4)]
            assert set(said) == {"a", "b"}

    run(work)


def test_what_may_have_been_stored_is_not_sent_twice() -> None:
    """Red when a batch could be made twice because an upstream broke after it got the request."""

    async def work() -> None:
        a, b = FakeUpstream("a", hang_up), FakeUpstream("b")
        async with routed(a, b) as app:
            told = await Talk(app).ask("/v1/batches")
            assert told.status == 503 and not b.seen

    run(work)


def test_a_stream_that_breaks_off_says_so_and_is_not_begun_again() -> None:
    """Red when a client gets the beginning of an answer twice, or takes half of one for whole."""

    async def work() -> None:
        a, b = FakeUpstream("a", break_off), FakeUpstream("b", break_off)
        async with routed(a, b) as app:
            told = await Talk(app).ask("/v1/chat/completions")
            assert told.body.startswith(b"data: one\n\ndata: {")
            assert told.body.count(b"data: one") == 1
            assert json.loads(told.body.split(b"data: ")[2])["error"]["code"] == "upstream_lost"
            assert len(a.seen) + len(b.seen) == 1

    run(work)


def test_a_client_that_leaves_takes_its_request_along() -> None:
    async def work() -> None:
        closed = asyncio.Event()

        async def endless(body: bytes, writer: Writer) -> None:
            kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\n" + kind)
            try:
                while True:
                    writer.write(b"9\r\ndata: a\n\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            except ConnectionError:
                closed.set()
                raise

        async with routed(FakeUpstream("a", endless)) as app:
            talk = Talk(app)
            task = asyncio.ensure_future(talk.ask("/v1/chat/completions"))
            while not talk.body:
                await asyncio.sleep(0.01)
            talk.leaves.set()
            await task
            await asyncio.wait_for(closed.wait(), 5.0)
            assert app.upstreams[0].num_open == 0

    run(work)


def test_draining_one() -> None:
    """Red when a drained upstream gets more, or its key is not asked for."""

    async def work() -> None:
        a, b = FakeUpstream("a"), FakeUpstream("b")
        async with routed(a, b, key="boss") as app:
            boss = [(b"authorization", b"Bearer boss")]
            assert (await Talk(app).ask("/router/drain/a")).status == 401
            told = await Talk(app).ask("/router/drain/a", b"", headers=boss)
            assert told.json["state"] == "draining"
            said = [(await Talk(app).ask("/v1/completions")).json["by"] for _ in range(4)]
            assert said == ["b"] * 4
            await Talk(app).ask("/router/resume/a", b"", headers=boss)
            said = [(await Talk(app).ask("/v1/completions")).json["by"] for _ in range(4)]
            assert set(said) == {"a", "b"}
            told = await Talk(app).ask("/router/drain/c", b"", headers=boss)
            assert told.status == 404 and "a, b" in told.json["error"]["message"]
            told = await Talk(app).ask("/router/upstreams", b"", "GET", boss)
            assert [one["name"] for one in told.json["data"]] == ["a", "b"]
            text = (await Talk(app).ask("/metrics", b"", "GET", boss)).body.decode()
            assert 'quire_router:up{upstream="a"} 1' in text

    run(work)


def test_one_conversation_stays_where_its_beginning_is() -> None:
    """Red when turns of a conversation are spread, or all conversations go to one upstream."""

    async def work() -> None:
        fakes = [FakeUpstream(name) for name in "abc"]
        async with routed(*fakes, policy="prefix") as app:
            places: dict[int, set[str]] = {}
            for turn in range(4):
                for talk in range(9):
                    text = f"{talk}" * 4_000 + "more " * 400 * turn
                    body = json.dumps({"prompt": text}).encode()
                    said = (await Talk(app).ask("/v1/completions", body)).json["by"]
                    places.setdefault(talk, set()).add(said)
            assert all(len(where) == 1 for where in places.values())
            assert set.union(*places.values()) == {"a", "b", "c"}

    run(work)


def test_a_long_body_passes_through() -> None:
    async def work() -> None:
        a = FakeUpstream("a")
        async with routed(a) as app:
            body = b"x" * 20_000_000
            assert (await Talk(app).ask("/v1/files", body)).status == 200
            assert a.seen == [body]

    run(work)


def test_answers_without_a_body() -> None:
    async def work() -> None:
        async def nothing(body: bytes, writer: Writer) -> None:
            writer.write(whole(b"", 204))

        async with routed(FakeUpstream("a", nothing)) as app:
            told = await Talk(app).ask("/v1/files/x", b"", "DELETE")
            assert (told.status, told.body) == (204, b"")

    run(work)

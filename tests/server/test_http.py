"""Heads and bodies within bounds, whatever the other end does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.server.http import (
    BodyRoom,
    ClientGone,
    HttpRequest,
    check_values,
    read_body,
    read_head,
)
from quire.server.problems import Problem
from quire.server.settings import Limits

LIMITS = Limits(max_body_bytes=100, body_idle_s=0.05, body_total_s=0.2)


def scope(headers: list[tuple[bytes, bytes]] | None = None, query: bytes = b"") -> dict[str, Any]:
    return {
        "method": "POST",
        "path": "/x",
        "http_version": "1.1",
        "query_string": query,
        "headers": [(b"host", b"h"), *(headers or [])],
    }


def head(*headers: tuple[bytes, bytes]) -> HttpRequest:
    return read_head(scope(list(headers)), "id")


def status(work: Any) -> int:
    with pytest.raises(Problem) as problem:
        work()
    return problem.value.status


# ------------------------------------------------------------ heads


def test_headers_are_bounded_in_number_and_bytes() -> None:
    assert status(lambda: head(*[(b"x%d" % i, b"") for i in range(101)])) == 431
    assert status(lambda: head((b"x", b"a" * 70_000))) == 431
    assert head((b"X-Odd", b"\xff")).headers["x-odd"] == "\xff"


def test_a_long_query_is_the_clients_mistake() -> None:
    """Red when many query fields are a 500."""
    assert status(lambda: read_head(scope(query=b"a=1&" * 50), "id")) == 400
    assert read_head(scope(query=b"hz=2&x=%ff"), "id").query["hz"] == "2"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"4"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"identity")],
    ],
)
def test_framing_that_a_proxy_may_read_otherwise_is_refused(
    headers: list[tuple[bytes, bytes]],
) -> None:
    assert status(lambda: head(*headers)) == 400


def test_http_1_1_needs_a_host() -> None:
    bare = scope() | {"headers": []}
    assert status(lambda: read_head(bare, "id")) == 400
    assert status(lambda: read_head(bare | {"headers": [(b"host", b"")]}, "id")) == 400
    read_head(bare | {"http_version": "1.0"}, "id")


# ------------------------------------------------------------ bodies


class Client:
    """Sends these parts, waiting so long before each; then leaves."""

    def __init__(self, *parts: bytes, pause_s: float = 0.0) -> None:
        self.parts, self.pause_s = list(parts), pause_s

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(self.pause_s)
        if not self.parts:
            return {"type": "http.disconnect"}
        part = self.parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self.parts)}


def read(client: Client, *headers: tuple[bytes, bytes], room: BodyRoom | None = None) -> bytes:
    return asyncio.run(read_body(head(*headers), client.receive, LIMITS, room or BodyRoom(10_000)))


def test_a_body_in_many_parts() -> None:
    assert read(Client(*[b"a"] * 90)) == b"a" * 90


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"101")],
        [(b"content-length", b"9" * 5_000)],  # int() refuses so many digits
        [],
    ],
)
def test_a_large_body_is_refused_before_it_is_kept(headers: list[tuple[bytes, bytes]]) -> None:
    assert status(lambda: read(Client(b"a" * 60, b"a" * 60), *headers)) == 413


def test_odd_lengths_are_not_believed() -> None:
    for odd in (b"\xb2", b"-1", b"1e3", b""):
        assert read(Client(b"ok"), (b"content-length", odd)) == b"ok"


def test_compressed_bodies_are_refused() -> None:
    assert status(lambda: read(Client(b""), (b"content-encoding", b"gzip"))) == 415
    assert read(Client(b"ok"), (b"content-encoding", b"identity")) == b"ok"


def test_a_silent_client_is_not_waited_for() -> None:
    assert status(lambda: read(Client(b"{", b"}", pause_s=0.1))) == 408


def test_a_client_that_trickles_is_not_waited_for_either() -> None:
    """Red when a byte now and then resets the clock for ever."""
    assert status(lambda: read(Client(*[b"a"] * 50, pause_s=0.02))) == 408


def test_a_client_that_leaves_in_the_middle() -> None:
    client = Client(b"{", b"")
    client.parts = [b"{"]

    async def receive() -> dict[str, Any]:
        return (await client.receive()) | {"more_body": True}

    with pytest.raises(ClientGone):
        asyncio.run(read_body(head(), receive, LIMITS, BodyRoom(1_000)))


def test_all_bodies_together_are_bounded() -> None:
    """Red when a thousand connections may hold eight megabytes each."""
    room = BodyRoom(150)
    first = head()
    asyncio.run(read_body(first, Client(b"a" * 90).receive, LIMITS, room))
    second = head()
    with pytest.raises(Problem) as problem:
        asyncio.run(read_body(second, Client(b"a" * 50, b"a" * 50).receive, LIMITS, room))
    assert problem.value.status == 503 and problem.value.retry_after_s == 1
    assert room.num_bytes == 140
    room.release(second)
    room.release(first)
    room.release(first)
    assert room.num_bytes == 0


def test_a_large_body_of_brackets_is_not_even_parsed() -> None:
    """Red when eight megabytes of `[],` may hold the event loop for more than a second."""
    limits = Limits()
    for body in (
        b'{"messages":[' + b"[]," * 2_000_000 + b"0]}",
        b'{"messages":[' + b"{}," * 2_000_000 + b"0]}",
        b"{" + b'"k":0,' * 300_000 + b'"z":0}',
    ):
        assert status(lambda body=body: check_values(body, limits)) == 413
    check_values(b'{"prompt": "' + b"a, " * 2_000_000 + b'"}', limits)
    check_values(b'{"prompt": [' + b"1," * 2_000_000 + b"1]}", limits)

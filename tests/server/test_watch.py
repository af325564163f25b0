"""The watchman: deadlines, readers that do not read, and signs of life."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass, field

import pytest

from quire.server.hang_up import OPEN_FILES, hang_up
from quire.server.http import HttpRequest
from quire.server.link import Tap
from quire.server.problems import Expired
from quire.server.settings import Limits
from quire.server.watch import PING_S, Watchman

LIMITS = Limits(write_stall_s=30.0)


def request() -> HttpRequest:
    return HttpRequest("POST", "/x", {}, {}, "id", begun=0.0)


async def sleeping() -> None:
    await asyncio.sleep(60)


@dataclass(eq=False)
class Open:
    """A generation as the watchman sees it."""

    http: HttpRequest = field(default_factory=request)
    tap: Tap = field(default_factory=Tap)
    deadline: float = 100.0
    timeout_s: float = 100.0
    heard: float = 0.0


def watched() -> tuple[Watchman, Open]:
    watchman, generation = Watchman(LIMITS), Open()
    generation.http.task = asyncio.ensure_future(sleeping())
    generation.http.deadline = generation.deadline
    watchman.generations.add(generation)  # type: ignore[arg-type]
    watchman.enter(generation.http)
    return watchman, generation


def test_a_reader_that_takes_nothing_is_dropped() -> None:
    async def work() -> None:
        watchman, generation = watched()
        http = generation.http
        http.sending_since = 10.0
        watchman.look(39.0)
        assert not http.task.cancelling()
        watchman.look(40.5)
        assert http.task.cancelling()
        assert http.notes["finish_reason"] == "slow reader"

    asyncio.run(work())


def test_a_deadline_ends_the_generation() -> None:
    async def work() -> None:
        watchman, generation = watched()
        watchman.look(99.0)
        watchman.look(100.5)
        with pytest.raises(Expired, match="100 s"):
            while True:
                await generation.tap.take()
        assert not generation.http.task.cancelling()

    asyncio.run(work())


def test_a_reader_that_sips_cannot_outlive_its_deadline_for_ever() -> None:
    """Red when a client that takes one chunk every 29 s keeps its place in the queue for days."""

    async def work() -> None:
        watchman, generation = watched()
        for now in range(10, 130, 5):
            generation.http.sending_since = float(now)
            watchman.look(float(now))
            assert not generation.http.task.cancelling()
        watchman.look(130.5)
        assert generation.http.task.cancelling()

    asyncio.run(work())


def test_quiet_streams_are_woken() -> None:
    async def work() -> None:
        watchman, generation = watched()
        waiting = asyncio.ensure_future(generation.tap.take())
        await asyncio.sleep(0)
        watchman.look(PING_S - 1)
        await asyncio.sleep(0)
        assert not waiting.done()
        watchman.look(PING_S + 1)
        assert await asyncio.wait_for(waiting, 1) == []
        assert generation.heard == PING_S + 1

    asyncio.run(work())


def test_requests_come_and_go() -> None:
    watchman = Watchman(LIMITS)
    one, two = request(), request()
    watchman.enter(one)
    watchman.enter(two)
    assert watchman.num_requests == 2
    watchman.leave(one)
    watchman.leave(one)
    assert watchman.num_requests == 1


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """(the client's end, ours)"""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def test_hanging_up_resets_the_right_connections_and_throws_away_what_was_not_read() -> None:
    """Red when a client that never reads can keep a file and its buffers for ever."""
    pairs = [tcp_pair() for _ in range(3)]
    files = len(os.listdir(OPEN_FILES))
    for _, own in pairs:
        own.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                own.send(b"x" * 65_536)
    assert hang_up([pairs[0][0].getsockname(), pairs[2][0].getsockname(), ("10.0.0.1", 1)]) == 2
    assert hang_up([]) == 0
    assert len(os.listdir(OPEN_FILES)) == files
    for number, (client, own) in enumerate(pairs):
        if number != 1:
            with pytest.raises(OSError):
                own.send(b"x")
            own.close()
            with pytest.raises(ConnectionResetError):
                while client.recv(65_536):
                    pass
        else:
            assert client.recv(10) == b"x" * 10
            own.close()
        client.close()


def test_a_dropped_reader_is_hung_up_on() -> None:
    async def work() -> None:
        client, own = tcp_pair()
        watchman, generation = watched()
        generation.http.client = client.getsockname()
        generation.http.sending_since = 0.0
        watchman.look(31.0)
        assert own.recv(1) == b""
        own.close()
        client.close()

    asyncio.run(work())

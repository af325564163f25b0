"""Several generations as one stream: nothing lost, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from quire.errors import EngineDead
from quire.outputs import StreamEvent
from quire.server import sse
from quire.server.admission import Admission, Size, Ticket
from quire.server.merge import all_whole, in_order, merged
from quire.server.outlet import Outlet
from quire.server.settings import Limits


class Scripted:
    """A generation that says its words, one a turn, and may fail at the end."""

    def __init__(self, words: str, failure: Exception | None = None) -> None:
        self.words, self.failure = words, failure
        self.is_cancelled = False
        self.admission = Admission(Limits())

    def admit(self) -> Ticket:
        return self.admission.enter("", Size(1, 1))

    async def join(self, ticket: Ticket) -> None:
        pass

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def show_through(self, *_: object) -> None:
        """Its outlet is not open: the reader sees to everything."""

    async def pieces(self) -> AsyncIterator[Sequence[StreamEvent]]:
        try:
            for word in self.words.split():
                await asyncio.sleep(0)
                yield [] if word == "..." else [StreamEvent(word, [1])]
            if self.failure is not None:
                raise self.failure
        except (asyncio.CancelledError, GeneratorExit):
            self.is_cancelled = True
            raise

    async def whole(self) -> None:
        async for _ in self.pieces():
            pass


def said(index: int, pieces: Sequence[StreamEvent]) -> bytes:
    return "".join(f"{index}{piece.text}\n" for piece in pieces).encode()


def read(*generations: Any) -> list[str]:
    async def work() -> bytes:
        async with aclosing(merged(list(generations), Outlet(), said)) as news:
            return b"".join([made async for made in news])

    return asyncio.run(work()).replace(sse.PING, b"ping\n").decode().split()


def test_everything_comes_in_its_own_order() -> None:
    """Red when pieces of one prompt are lost or mixed into another's."""
    found = read(Scripted("a b"), Scripted("c"), Scripted("d ... e f"))
    assert sorted(found) == ["0a", "0b", "1c", "2d", "2e", "2f", "ping"]
    for index, want in enumerate(("ab", "c", "def")):
        assert "".join(word[1:] for word in found if word[0] == str(index)) == want
    assert read(Scripted("a ... b")) == ["0a", "ping", "0b"]


def test_one_failure_ends_the_others() -> None:
    """Red when a prompt that fails leaves the rest generating for nobody."""
    endless = Scripted("word " * 100_000)
    with pytest.raises(EngineDead):
        read(endless, Scripted("a", EngineDead("gone")))
    assert endless.is_cancelled
    with pytest.raises(EngineDead):
        scripts: list[Any] = [endless, Scripted("a", EngineDead("gone"))]
        asyncio.run(all_whole(in_order(scripts), lambda *_: None))


def test_leaving_early_leaves_nothing_behind() -> None:
    """Red when a client that goes leaves tasks, or errors nobody retrieves, in the loop."""
    complaints: list[dict[str, Any]] = []

    async def work() -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        scripts: list[Any] = [Scripted("word " * 1_000) for _ in range(3)]
        async with aclosing(merged(scripts, Outlet(), said)) as pieces:
            async for _ in pieces:
                break
        return len(asyncio.all_tasks())

    assert asyncio.run(work()) == 1
    assert complaints == []

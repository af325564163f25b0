"""Several generations as one stream: nothing lost, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from quire.errors import EngineDead
from quire.outputs import StreamEvent
from quire.server.admission import Admission, Size, Ticket
from quire.server.merge import all_whole, in_order, merged
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


def read(*generations: Any) -> dict[int, list[str | None]]:
    async def work() -> dict[int, list[str | None]]:
        found: dict[int, list[str | None]] = {}
        async with aclosing(merged(list(generations))) as news:
            async for index, pieces in news:
                found.setdefault(index, []).extend([piece.text for piece in pieces] or [None])
        return found

    return asyncio.run(work())


def test_everything_comes_in_its_own_order() -> None:
    """Red when pieces of one prompt are lost or mixed into another's."""
    want: dict[int, list[str | None]] = {0: ["a", "b"], 1: ["c"], 2: ["d", None, "e", "f"]}
    assert read(Scripted("a b"), Scripted("c"), Scripted("d ... e f")) == want
    assert read(Scripted("a ... b")) == {0: ["a", None, "b"]}


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
        async with aclosing(merged(scripts)) as pieces:
            async for _ in pieces:
                break
        return len(asyncio.all_tasks())

    assert asyncio.run(work()) == 1
    assert complaints == []

"""Several generations of one HTTP request: one place for all, entered one behind another.

The first is let in or refused for all of them (`admission.py`). Each later one waits for room, so
that a long list waits here and not in the queue that everybody shares. The first failure ends the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from quire.outputs import StreamEvent
from quire.server import sse
from quire.server.admission import Ticket
from quire.server.generation import Generation
from quire.server.outlet import Outlet

T = TypeVar("T")
ShowPart = Callable[[int, Sequence[StreamEvent]], bytes]  # pieces of one as the client gets them


async def in_order(generations: list[Generation]) -> AsyncGenerator[Generation, None]:
    for generation in generations:
        yield generation


async def all_whole(
    generations: AsyncGenerator[Generation, None], result: Callable[[int, Generation], T]
) -> list[T]:
    """What `result` makes of each when it is done. Only those in the engine are held on to."""
    found: dict[int, T] = {}

    async def finish(index: int, generation: Generation) -> None:
        await generation.whole()
        found[index] = result(index, generation)

    await _run(generations, finish)
    return [found[index] for index in range(len(found))]


async def merged(
    generations: list[Generation], outlet: Outlet, show: ShowPart
) -> AsyncGenerator[bytes, None]:
    """What the client gets, as far as the reader has to see to it. All else is written through the
    outlet while the reader sleeps. Close it when done."""
    if len(generations) == 1:
        generations[0].show_through(outlet, partial(show, 0))
        async with generations[0] as alone:
            async for pieces in alone.pieces():
                if made := show(0, pieces) if pieces else sse.PING:
                    yield made
        return
    line = _Line(outlet)
    for index, generation in enumerate(generations):
        generation.show_through(line, partial(show, index))

    async def pump(index: int, generation: Generation) -> None:
        async for pieces in generation.pieces():
            line.put(show(index, pieces) if pieces else sse.PING)

    running = asyncio.create_task(_run(in_order(generations), pump))
    running.add_done_callback(lambda _: line.end())
    try:
        while made := await line.get():
            yield made
        running.result()  # raises what ended it
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class _Line:
    """One client for several generations. While the reader sleeps, each writes to it by itself;
    what comes while it is at work, or while the client is behind, it sends in one write."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet, self._waiting = outlet, bytearray()
        self._is_over = False
        self._unsent: Awaitable[None] | None = None  # the rest of a write
        self._sleeper: asyncio.Future[None] | None = None  # the reader

    @property
    def is_open(self) -> bool:
        return self._outlet.is_open

    def write(self, chunk: bytes) -> None:
        if not self._is_asleep:
            self._waiting += chunk
        elif (unsent := self._outlet.write(chunk)) is not None:
            self._unsent = unsent
            self._wake()

    def put(self, chunk: bytes) -> None:
        self._waiting += chunk
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    async def get(self) -> bytes:
        """What waits, once all bytes before it are on their way; nothing at the end."""
        while True:
            if self._unsent is not None:
                unsent, self._unsent = self._unsent, None
                await unsent
            elif self._waiting or self._is_over:
                waiting, self._waiting = bytes(self._waiting), bytearray()
                return waiting
            else:
                self._sleeper = asyncio.get_running_loop().create_future()
                await self._sleeper

    @property
    def _is_asleep(self) -> bool:
        return self._sleeper is not None and not self._sleeper.done()

    def _wake(self) -> None:
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)


async def _run(
    generations: AsyncGenerator[Generation, None],
    work: Callable[[int, Generation], Awaitable[None]],
) -> None:
    """Let them in, do `work` with each, and give the request's place back at the end."""
    ticket: Ticket | None = None
    index = 0

    async def run(index: int, generation: Generation) -> None:
        async with generation:
            await work(index, generation)

    try:
        async with asyncio.TaskGroup() as group, aclosing(generations):
            async for generation in generations:
                if ticket is None:
                    generation.ticket = ticket = generation.admit()
                else:
                    await generation.join(ticket)
                group.create_task(run(index, generation))
                index += 1
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        if ticket is not None:
            generation.admission.leave(ticket)

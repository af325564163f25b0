"""Several generations of one HTTP request: one place for all, entered one behind another.

The first is let in or refused for all of them (`admission.py`). Each later one waits for room, so
that a long list waits here and not in the queue that everybody shares. The first failure ends the
others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from quire.outputs import StreamEvent
from quire.server.admission import Ticket
from quire.server.generation import Generation

T = TypeVar("T")


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
    generations: list[Generation],
) -> AsyncGenerator[tuple[int, Sequence[StreamEvent]], None]:
    """(which generation, all its pieces so far) as they come; none is a sign of life. Close it
    when done."""
    if len(generations) == 1:
        async with generations[0] as alone:
            async for pieces in alone.pieces():
                yield 0, pieces
        return
    queue: asyncio.Queue[tuple[int, Sequence[StreamEvent]] | None] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        async for pieces in generation.pieces():
            queue.put_nowait((index, pieces))

    running = asyncio.create_task(_run(in_order(generations), pump))
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            yield item
        running.result()  # raises what ended it
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


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

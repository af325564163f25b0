"""Several generations of one HTTP request, waited for together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from quire.outputs import StreamEvent
from quire.server.generation import Generation


async def all_whole(generations: list[Generation]) -> None:
    """Wait for all; the first failure ends the others."""
    tasks = [asyncio.ensure_future(generation.whole()) for generation in generations]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(
    generations: list[Generation],
) -> AsyncGenerator[tuple[int, StreamEvent | None], None]:
    """(which generation, its piece) as they come; None is a sign of life. Close it when done."""
    if len(generations) == 1:
        async for pieces in generations[0].pieces():
            for piece in pieces or (None,):
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, StreamEvent | None] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        async for pieces in generation.pieces():
            for piece in pieces or (None,):
                queue.put_nowait((index, piece))

    tasks = [asyncio.create_task(pump(i, g)) for i, g in enumerate(generations)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                num_open -= 1
                item.result()  # raises what ended it
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

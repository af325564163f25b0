"""Send the work. An open loop keeps its times whatever the server does; a closed loop waits.

In an open loop latency counts from the time a request was meant to be sent. Otherwise a server that
stalls would also stall the client, and the requests that suffered most would never be measured
(coordinated omission). How far the client itself fell behind is reported beside it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable

from quire.bench.serve.client import Outcome, Target, send
from quire.bench.serve.work import Ask


async def open_loop(target: Target, asks: Iterable[Ask]) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def at_its_time(ask: Ask) -> Outcome:
        await asyncio.sleep(begun + ask.at - loop.time())
        return await send(target, ask, ask.at, begun)

    return list(await asyncio.gather(*(at_its_time(ask) for ask in asks)))


async def closed_loop(target: Target, asks: Iterable[Ask], num_clients: int) -> list[Outcome]:
    loop = asyncio.get_running_loop()
    begun, left = loop.time(), iter(asks)

    async def client() -> list[Outcome]:
        return [await send(target, ask, loop.time() - begun, begun) for ask in left]

    found = await asyncio.gather(*(client() for _ in range(num_clients)))
    return [outcome for mine in found for outcome in mine]


def run(
    target: Target, asks: list[Ask], num_clients: int | None, warmup: list[Ask]
) -> list[Outcome]:
    """`num_clients` of a closed loop; None: an open one. Warm-up requests are not measured."""

    async def work() -> list[Outcome]:
        await closed_loop(target, warmup, num_clients=4)
        gc.collect()
        gc.freeze()  # a collection in the midst would look like the server's pause
        try:
            if num_clients is None:
                return await open_loop(target, asks)
            return await closed_loop(target, asks, num_clients)
        finally:
            gc.unfreeze()

    return asyncio.run(work())

"""A model that is parked and comes back, while requests to another model go on.

Parked is: the process is there, everything imported, and has no weights. Files are in the page
cache. The other model's visitors come at fixed moments, in turn with phases in which nobody parks.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.e2e.harness import Served

Visit = Callable[[Served, random.Random, str, int], Awaitable[list[Any]]]


def model_of(served: Served, name: str) -> dict[str, Any]:
    models: list[dict[str, Any]] = served.get("/v1/models")[1]["data"]
    return next(one for one in models if one["id"] == name)


async def away(served: Served, name: str) -> None:
    """Until its process has imported everything: it grows until then."""
    await asyncio.to_thread(served.post, "/admin/models/park", {"model": name})
    while (await asyncio.to_thread(model_of, served, name))["state"] != "parked":
        await asyncio.sleep(0.02)
    size = -1
    while (grown := (await asyncio.to_thread(model_of, served, name))["memory"]) != size:
        size = grown
        await asyncio.sleep(3.0)


async def back(served: Served, name: str) -> float:
    """Seconds until a request to it is answered."""
    begun = time.perf_counter()
    body = {"model": name, "prompt": "hello", "max_tokens": 1}
    status, _ = await asyncio.to_thread(served.post, "/v1/completions", body, None, 300.0)
    assert status == 200, status
    return time.perf_counter() - begun


async def come_and_go(served: Served, name: str, times: int) -> list[float]:
    seconds = []
    for _ in range(times):
        await away(served, name)
        await asyncio.sleep(0.5)
        seconds.append(await back(served, name))
        await asyncio.sleep(0.5)
    return seconds


def park(
    served: Served,
    names: Sequence[str],
    draw: random.Random,
    times: int,
    visit: Visit,
    told: Callable[[Sequence[Any]], dict[str, float]],
) -> dict[str, Any]:
    """`visit` is a phase of requests to a model; it raises where one of them is lost."""

    async def alone(name: str) -> list[float]:
        return await come_and_go(served, name, times)

    async def beside(name: str, other: str) -> tuple[list[float], list[Any], list[Any]]:
        quiet: list[Any] = []
        busy: list[Any] = []
        seconds: list[float] = []
        for _ in range(times):
            quiet += await visit(served, draw, other, 20)
            coming = asyncio.create_task(come_and_go(served, name, 1))
            while not coming.done():
                busy += await visit(served, draw, other, 5)
            seconds += await coming
        return seconds, quiet, busy

    found: dict[str, Any] = {}
    for name, other in (tuple(names), tuple(reversed(names))):
        by_itself = asyncio.run(alone(name))
        seconds, quiet, busy = asyncio.run(beside(name, other))
        found[name] = {
            "back_s": [round(s, 2) for s in by_itself],
            "back_s_median": round(statistics.median(by_itself), 2),
            "back_s_beside_traffic": [round(s, 2) for s in seconds],
            "others_requests": len(busy),
            "others_lost": 0,  # one would have ended this run
            "others_undisturbed": told(quiet),
            "others_meanwhile": told(busy),
        }
    return found

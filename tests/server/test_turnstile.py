"""Requests that come at once leave gaps for everybody else's tokens."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

from quire.server.turnstile import PER_TURN, Turnstile
from tests.server.asgi import Call
from tests.server.fakes import Bench


def test_a_few_in_each_turn_and_in_order() -> None:
    """Red when a crowd gets in within one turn, when one is forgotten, or passed by another."""
    num_turns = 0
    came_in: list[tuple[int, int]] = []

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def come(turnstile: Turnstile, number: int) -> None:
        await turnstile.enter()
        came_in.append((number, num_turns))

    async def work() -> None:
        turnstile, clock = Turnstile(), asyncio.ensure_future(count_turns())
        crowd = [asyncio.ensure_future(come(turnstile, number)) for number in range(100)]
        await asyncio.sleep(0)
        crowd[50].cancel()  # its client left in the line
        await asyncio.gather(*crowd, return_exceptions=True)
        await asyncio.sleep(0)
        clock.cancel()

    asyncio.run(work())
    assert [number for number, _ in came_in] == [n for n in range(100) if n != 50]
    assert max(Counter(turn for _, turn in came_in).values()) <= PER_TURN
    assert came_in[-1][1] <= 100 // PER_TURN + 4, "and no turn is idle"


def test_who_comes_alone_does_not_wait() -> None:
    async def work() -> None:
        turnstile = Turnstile()
        for _ in range(3 * PER_TURN):
            coming = turnstile.enter()
            try:
                coming.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waits, and nobody is there")
            for _ in range(2):
                await asyncio.sleep(0)

    asyncio.run(work())


def test_tokens_come_between_requests_that_come_at_once() -> None:
    """Red when a stream stands still until the last of a hundred requests is in."""

    async def work() -> None:
        bench = Bench()
        bench.link.answer = "a" * 400
        stream = Call(bench.app, "POST", "/v1/completions")
        stream.send_body({"prompt": "x", "max_tokens": 400, "stream": True})
        while stream.num_writes < 5:
            await asyncio.sleep(0)
        crowd = [Call(bench.app, "POST", "/v1/completions") for _ in range(100)]
        for one in crowd:
            one.send_body({"prompt": "x", "max_tokens": 2})
        seen = Counter[int]()  # how many were let in while the stream had so many parts
        num_before = len(bench.link.submitted)
        while len(bench.link.submitted) < num_before + 100:
            await asyncio.sleep(0)
            seen[stream.num_writes] = len(bench.link.submitted) - num_before
        counts = [0, *(seen[key] for key in sorted(seen))]
        steps = [after - before for before, after in itertools.pairwise(counts)]
        assert max(steps) <= 2 * PER_TURN
        stream.leave()
        for one in (stream, *crowd):
            await one.end()

    asyncio.run(work())

"""Requests made wrong at any depth: refused or answered, never a 500, and nothing is kept."""

from __future__ import annotations

import asyncio
import os

from tests.server.asgi import call
from tests.server.fakes import Bench
from tests.server.mutations import BASES, mutated
from tests.server.test_generation import held, nothing

NUM_MUTATIONS = 20_000 if os.environ.get("QUIRE_LONG_TESTS") else 400


def test_the_requests_that_are_mutated_work() -> None:
    """Red when a base is refused as it is: its mutations would test nothing."""
    bench = Bench()
    bench.link.pool = lambda ids: [1.0, 2.0, 3.0]
    for path, body in BASES:
        reply = bench.post(path, body)
        want = 400 if path == "/classify" else 200  # this model has no head for it
        assert reply.status_code == want, (path, reply.text)


def test_no_mutation_of_a_request_is_our_fault() -> None:
    """FZ-06. Red when a body that is wrong somewhere deep inside raises what nobody expected."""

    async def work() -> list[str]:
        bench, faults = Bench(), []
        bench.link.pool = lambda ids: [1.0, 2.0, 3.0]
        for number in range(NUM_MUTATIONS):
            path, body = mutated(number)
            answer = await call(bench.app, "POST", path, body)
            if not 200 <= answer.status < 500 or b"internal error" in answer.body:
                faults.append(f"{number}: {answer.status} {path} {body[:300]!r}")
        assert held(bench) == nothing()
        return faults

    assert asyncio.run(work()) == []

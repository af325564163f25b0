"""More work than there is room for: bounded lines, deadlines, fairness between keys, and a pool so
small that requests are preempted, which must not change a single token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import StreamClient, exchange, request_bytes
from tests.tiny_folder import write_tiny_folder

FLAGS = (
    *("--device", "cpu", "--load-format", "dummy", "--page-size", "8", "--max-num-seqs", "8"),
    *("--kv-cache-memory", "140KiB", "--max-model-len", "512", "--dtype", "float32"),
    *("--max-queued-requests", "8", "--queue-timeout", "2", "--request-timeout", "30"),
)
LONG = {"prompt": "once upon a time", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    with Served(folder, *FLAGS) as made:
        yield made


@pytest.fixture
def paused(served: Served) -> Iterator[Served]:
    """The engine takes requests and does nothing about them."""
    assert served.post("/admin/pause", {})[0] == 200
    yield served
    assert served.post("/admin/resume", {})[0] == 200
    served.wait_idle()


async def at_once(served: Served, bodies: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    calls = [asyncio.to_thread(served.post, "/v1/completions", body) for body in bodies]
    return list(await asyncio.gather(*calls))


def preempted(served: Served) -> float:
    return sum(v for k, v in served.counts().items() if k.startswith("num_preemptions"))


def test_preemption_changes_nothing(served: Served) -> None:
    """CO-02. Red when a request that lost its pages answers otherwise than one that kept them."""
    bodies = [
        {
            "prompt": f"{number} little pages " * (1 + number % 3),
            "max_tokens": 120,
            "ignore_eos": True,
            "temperature": 0.0 if number % 2 else 0.9,
            "seed": number,
            "return_token_ids": True,
        }
        for number in range(8)
    ]
    alone = [served.post("/v1/completions", body) for body in bodies]
    assert preempted(served) == 0
    together = asyncio.run(at_once(served, bodies))
    wait_until(lambda: preempted(served) > 0, 3, "a preemption: the pool is too large")
    for (_, one), (_, other) in zip(alone, together, strict=True):
        assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
        assert len(one["choices"][0]["token_ids"]) == 120
    served.wait_idle()


def test_a_full_server_refuses_at_once_and_says_when_to_come_back(paused: Served) -> None:
    """LD-03. Red when the line is endless, refusals are slow, or hold on to a place."""
    served = paused

    async def work() -> None:
        clients = [StreamClient(served.port, "/v1/completions", LONG) for _ in range(16)]
        tasks = [asyncio.ensure_future(client.run()) for client in clients]
        await asyncio.to_thread(wait_until, lambda: waiting(served) >= 16, 10, "16 waiting")
        seconds = []
        for _ in range(50):
            begun = time.monotonic()
            status, body = await asyncio.to_thread(served.complete)
            seconds.append(time.monotonic() - begun)
            assert (status, body["error"]["code"]) == (429, "queue_full")
        assert sorted(seconds)[45] < 0.25
        head = await asyncio.to_thread(_head_of_refusal, served)
        assert b"retry-after:" in head.lower()
        assert served.get("/health")[0] == 200
        status, body = served.get("/ready")
        assert status == 503 and "paused" in body["reason"]
        for client, task in zip(clients, tasks, strict=True):
            client.hang_up()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(work())
    served.wait_idle()


def _head_of_refusal(served: Served) -> bytes:
    return exchange(served.port, request_bytes("/v1/completions", LONG))[1]


def waiting(served: Served) -> float:
    return sum(v for k, v in served.counts().items() if k.startswith("num_requests_waiting"))


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_too_long_to_start_is_a_503(paused: Served, stream: bool) -> None:
    """Red when a request waits past --queue-timeout (2 s here)."""
    begun = time.monotonic()
    status, body = paused.complete(stream=stream)
    assert (status, body["error"]["code"]) == (503, "queue_timeout")
    assert 1.5 < time.monotonic() - begun < 6


def test_a_deadline_ends_a_running_request(served: Served) -> None:
    """Red when `timeout` is only a wish; the work stops too, not only the answer."""

    async def work() -> None:
        client = StreamClient(served.port, "/v1/completions", LONG | {"timeout": 0.3})
        await client.open()
        await client.read(1)
        await asyncio.to_thread(served.post, "/admin/pause", {})
        try:
            seen = await asyncio.wait_for(client.read(), 5)
        finally:
            await asyncio.to_thread(served.post, "/admin/resume", {})
        assert [error["code"] for error in seen.errors] == ["deadline_exceeded"]

    asyncio.run(work())
    served.wait_idle()


def test_an_operator_can_end_everything(paused: Served) -> None:
    async def work() -> None:
        calls = asyncio.ensure_future(at_once(paused, [LONG] * 3))
        await asyncio.to_thread(wait_until, lambda: waiting(paused) >= 3, 5, "three waiting")
        done = await asyncio.to_thread(paused.post, "/admin/abort", {"all": True})
        assert done == (200, {"aborted": 3})
        for status, body in await calls:
            assert (status, body["error"]["code"]) == (503, "aborted")

    asyncio.run(work())

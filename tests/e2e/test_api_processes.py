"""Several API processes on one port, from outside: one server to everybody who asks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import StreamClient
from tests.tiny_folder import write_tiny_folder

KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = write_tiny_folder(
        tmp_path_factory.mktemp("model"), max_position_embeddings=4_096
    )
    flags = ("--device", "cpu", "--load-format", "dummy", "--threads", "1", "--max-num-seqs", "8")
    more = ("--api-processes", "2", "--max-queued-requests", "2", "--public-metrics")
    with Served(folder, *flags, *more, "--admin-api-key", "boss", "--api-key", "secret") as made:
        yield made


def apis(served: Served) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(served.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # a zombie counts as one
            if "quire.server.api_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def owner(served: Served, client: StreamClient) -> int:
    """Pid of the API process at the other end of a connection."""
    for process in apis(served):
        for connection in process.net_connections("tcp"):
            if connection.raddr and connection.raddr.port == client.local_port:
                return process.pid
    raise AssertionError("nobody holds this connection")


def clients(served: Served, count: int) -> list[StreamClient]:
    body = {"prompt": "hello", "max_tokens": 3_000, "ignore_eos": True}
    return [StreamClient(served.port, "/v1/completions", body, headers=KEY) for _ in range(count)]


def counted(served: Served, name: str) -> float:
    return sum(value for key, value in served.counts().items() if key.startswith(name))


def test_every_process_answers_for_all(several: Served) -> None:
    """Each question may reach either process. Red when counts depend on who answers."""
    before = counted(several, "requests_accepted_total")
    for _ in range(12):
        status, _ = several.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, KEY)
        assert status == 200
    assert {counted(several, "requests_accepted_total") for _ in range(12)} == {before + 12}
    summaries = [several.get("/v1/metrics", KEY)[1] for _ in range(8)]
    assert {one["requests"]["accepted"] for one in summaries} == {before + 12}
    assert len(apis(several)) == 2


def test_what_is_remembered_is_known_to_all(several: Served) -> None:
    """Each call may reach either process. Red when one does not know what the other stored, or
    cannot stop what runs there."""
    last: str | None = None
    for number in range(8):
        body = {"input": f"turn {number}", "max_output_tokens": 2, "previous_response_id": last}
        status, made = several.post("/v1/responses", body, KEY)
        assert status == 200
        last = made["id"]
    items = several.get(f"/v1/responses/{last}/input_items?limit=100", KEY)[1]["data"]
    assert len(items) == 15
    for _ in range(4):
        body = {"input": "hi", "background": True, "max_output_tokens": 3_000}
        _, made = several.post("/v1/responses", body, KEY)
        path = f"/v1/responses/{made['id']}"
        wait_until(lambda path=path: several.get(path, KEY)[1]["status"] != "queued", 20, "begun")
        several.post(f"{path}/cancel", {}, KEY)
    several.wait_idle()


def test_places_are_counted_together_and_a_pause_is_known_to_all(several: Served) -> None:
    """Ten places for both. Red when each process has ten, or one does not know of the pause."""
    boss = {"authorization": "Bearer boss"}

    async def work() -> list[int]:
        all_ = clients(several, 30)
        tasks = [asyncio.ensure_future(client.open()) for client in all_]
        while sum(client.seen.status == 429 for client in all_) < 20:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        for client, task in zip(all_, tasks, strict=True):
            client.hang_up()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [client.seen.status for client in all_]

    assert several.post("/admin/pause", {}, boss)[0] == 200
    try:
        wait_until(
            lambda: all(several.get("/ready")[0] == 503 for _ in range(6)), 5, "all say paused"
        )
        statuses = asyncio.run(work())
    finally:
        assert several.post("/admin/resume", {}, boss)[0] == 200
    assert sorted(statuses) == [0] * 10 + [429] * 20  # ten wait for their first token
    wait_until(lambda: all(several.get("/ready")[0] == 200 for _ in range(6)), 5, "all resumed")
    several.wait_idle()


def test_an_operator_ends_requests_of_every_process(several: Served) -> None:
    async def work() -> int:
        all_ = clients(several, 8)
        tasks = [asyncio.ensure_future(client.run()) for client in all_]
        while not all(client.seen.status for client in all_):
            await asyncio.sleep(0.02)
        boss = {"authorization": "Bearer boss"}
        _, found = await asyncio.to_thread(several.post, "/admin/abort", {"all": True}, boss)
        await asyncio.gather(*tasks, return_exceptions=True)
        return int(found["aborted"])

    assert asyncio.run(work()) == 8
    several.wait_idle()


def test_one_dies_alone(several: Served) -> None:
    """Its streams end, the others go on, its places are free, its counts are not forgotten."""

    async def work() -> tuple[list[StreamClient], int]:
        all_ = clients(several, 8)
        tasks = [asyncio.ensure_future(client.run()) for client in all_]
        while not all(client.seen.status for client in all_):
            await asyncio.sleep(0.02)
        owners = [owner(several, client) for client in all_]
        victim = max(set(owners), key=owners.count)
        await asyncio.sleep(1.2)  # what it counted so far is written down
        os.kill(victim, signal.SIGKILL)
        hit = [c for c, pid in zip(all_, owners, strict=True) if pid == victim]
        spared = [c for c, pid in zip(all_, owners, strict=True) if pid != victim]
        for client, task in zip(all_, tasks, strict=True):
            if client in hit:
                await asyncio.gather(task, return_exceptions=True)
        for client in spared:
            before = client.seen.num_events
            while client.seen.num_events == before and not client.seen.is_done:
                await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        for client in spared:
            client.hang_up()
        await asyncio.gather(*tasks, return_exceptions=True)
        return hit, victim

    engine, before = several.engine.pid, counted(several, "requests_accepted_total")
    hit, victim = asyncio.run(work())
    assert hit and not any(client.seen.is_done for client in hit)
    assert several.engine.pid == engine
    wait_until(lambda: len(apis(several)) == 2, 10, "a new one")
    assert victim not in [process.pid for process in apis(several)]
    several.wait_idle()
    wait_until(lambda: counted(several, "requests_accepted_total") == before + 8, 10, "counts")
    for _ in range(10):
        status, _ = several.post("/v1/completions", {"prompt": "b", "max_tokens": 2}, KEY)
        assert status == 200


def test_draining_ends_all(several: Served) -> None:
    """Last: the server is gone afterwards. What runs in either process finishes."""

    async def work() -> list[StreamClient]:
        body = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True}
        all_ = [StreamClient(several.port, "/v1/completions", body, headers=KEY) for _ in range(8)]
        tasks = [asyncio.ensure_future(client.run()) for client in all_]
        while not all(client.seen.status for client in all_):
            await asyncio.sleep(0.01)
        several.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*tasks, return_exceptions=True)
        return all_

    finished = asyncio.run(work())
    assert all(c.seen.is_done and c.seen.num_tokens == 150 for c in finished)
    assert several.process.wait(20) == 0

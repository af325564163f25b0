"""Killed processes: what clients see, what comes back, and what is left behind. One server for
most of it, the cheapest faults first; the crashes it may have in ten minutes are counted."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import StreamClient, dial
from tests.tiny_folder import write_tiny_folder

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "32")
LONG = {"prompt": "once upon a time", "max_tokens": 3_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4_096)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, *FLAGS) as made:
        yield made


def family(served: Served) -> list[psutil.Process]:
    parent = psutil.Process(served.process.pid)
    return [parent, *parent.children(recursive=True)]


async def open_streams(served: Served, count: int, **fields: Any) -> list[StreamClient]:
    made = [StreamClient(served.port, "/v1/completions", LONG | fields) for _ in range(count)]
    await asyncio.gather(*(client.open() for client in made))
    return made


def is_not_ready(served: Served) -> bool:
    return bool(served.get("/ready")[0] == 503)


def is_draining(served: Served) -> bool:
    status, body = served.get("/ready")
    return bool(status == 503 and body["reason"] == "draining")


def test_kill_9_of_the_engine_under_load(served: Served) -> None:
    """FT-01. Red when clients wait for ever, the API process goes too, or nothing comes back."""
    api, engine = served.api.pid, served.engine.pid

    async def work() -> list[Any]:
        clients = await open_streams(served, 28)
        await asyncio.gather(*(client.read(2) for client in clients))
        queued = [StreamClient(served.port, "/v1/completions", LONG) for _ in range(12)]
        waiting = [asyncio.ensure_future(client.run()) for client in queued]
        whole = asyncio.ensure_future(asyncio.to_thread(served.complete, **LONG))
        await asyncio.sleep(0.3)
        os.kill(engine, signal.SIGKILL)
        killed = time.monotonic()
        ends = [*(client.read() for client in clients), *waiting]
        seen = await asyncio.wait_for(asyncio.gather(*ends), 10)
        assert time.monotonic() - killed < 2.0
        status, body = await whole
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        return list(seen)

    for stream in asyncio.run(work()):
        assert not stream.is_done
        assert stream.status in (200, 503)
        if stream.status == 200:
            assert [error["code"] for error in stream.errors] == ["engine_unavailable"]
    assert served.get("/health")[0] == 200 and is_not_ready(served)
    status, body = served.complete()
    assert status == 503 and "restarting" in body["error"]["message"]
    wait_until(served.is_ready, 40, "the engine is back")
    assert served.api.pid == api and served.engine.pid != engine
    assert served.complete()[0] == 200
    served.wait_idle()


def test_kill_9_of_the_api_process_under_load(served: Served) -> None:
    """FT-02. Red when the engine works on for clients that nobody can answer any more."""
    api, engine = served.api.pid, served.engine.pid

    async def work() -> None:
        clients = await open_streams(served, 8)
        await asyncio.gather(*(client.read(2) for client in clients))
        os.kill(api, signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*(c.read() for c in clients)), 5)

    asyncio.run(work())
    wait_until(served.is_ready, 20, "the API process is back")
    assert served.engine.pid == engine and served.api.pid != api
    served.wait_idle(5)
    assert served.complete()[0] == 200


def test_a_stopped_engine_is_not_ready(served: Served) -> None:
    """Red when an engine that answers nothing still draws traffic. It may come back by itself."""
    engine = served.engine
    assert served.is_ready()
    engine.suspend()
    try:
        wait_until(lambda: is_not_ready(served), 15, "not ready")
        assert "silent" in served.get("/ready")[1]["reason"]
        assert served.get("/health")[0] == 200
    finally:
        engine.resume()
    wait_until(served.is_ready, 5, "ready again")
    assert served.complete()[0] == 200 and served.engine.pid == engine.pid


def test_kill_9_of_the_supervisor(served: Served) -> None:
    """FT-03, the last test of this server. Red when anything of it survives."""
    served.post("/v1/completions", {"prompt": "x", "guided_regex": "a+"})  # starts the worker
    everyone = family(served)
    assert len(everyone) >= 4
    served.process.kill()
    served.process.wait()
    wait_until(lambda: not any(map(is_running, everyone)), 2.0, "everyone gone")
    # A process counts as gone with its first thread; its sockets close with the last one.
    wait_until(lambda: is_refused(served.port), 2.0, "nobody listens")


def is_refused(port: int) -> bool:
    try:
        dial(port).close()
    except ConnectionRefusedError:
        return True
    return False


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_sigterm_drains(folder: Path) -> None:
    """FT-08. Red when SIGTERM cuts answers off, takes new ones, or leaves processes."""
    with Served(folder, *FLAGS, "--drain-timeout", "20") as served:
        everyone = family(served)

        async def work() -> None:
            clients = await open_streams(served, 4, max_tokens=300)
            await asyncio.gather(*(client.read(2) for client in clients))
            served.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: is_not_ready(served), 2, "not ready")
            status, body = await asyncio.to_thread(served.complete)
            assert (status, body["error"]["code"]) == (503, "draining")
            for seen in await asyncio.gather(*(client.read() for client in clients)):
                assert seen.is_done and not seen.errors and seen.num_tokens == 300

        asyncio.run(work())
        assert served.process.wait(10) == 0
        assert not any(map(is_running, everyone))
        assert 'unfinished": 0' in served.tail()


def test_a_drain_has_an_end_and_a_second_sigterm_has_it_at_once(folder: Path) -> None:
    """Red when a long answer can hold up a shutdown, or is cut off without a word."""
    with Served(folder, *FLAGS, "--drain-timeout", "60") as served:

        async def work() -> float:
            (client,) = await open_streams(served, 1)
            await client.read(2)
            served.post("/admin/pause", {})  # so that it would never end
            served.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: is_draining(served), 2, "draining")
            begun = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            seen = await asyncio.wait_for(client.read(), 5)
            assert [error["code"] for error in seen.errors] == ["draining"]
            return begun

        begun = asyncio.run(work())
        assert served.process.wait(10) == 0
        assert time.monotonic() - begun < 5.0


def test_sigterm_while_loading(folder: Path) -> None:
    """FT-09. Red when a server that is not up yet cannot be stopped."""
    served = Served(folder, *FLAGS)
    try:
        wait_until(lambda: len(family(served)) >= 3, 20, "children")
        time.sleep(0.5)
        everyone = family(served)
        begun = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(10) == 0
        assert time.monotonic() - begun < 5.0
        assert not any(map(is_running, everyone))
    finally:
        served.process.kill()

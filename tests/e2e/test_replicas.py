"""Two replicas behind one address, from outside: one server to everybody who asks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Served, free_port, wait_until
from tests.e2e.raw import StreamClient
from tests.tiny_folder import write_tiny_folder

KEY, BOSS = ({"authorization": f"Bearer {name}"} for name in ("secret", "boss"))
FLAGS = ("--device", "cpu", "--load-format", "dummy", "--threads", "1", "--replicas", "2")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = write_tiny_folder(
        tmp_path_factory.mktemp("model"), max_position_embeddings=4_096
    )
    keys = ("--api-key", "secret", "--admin-api-key", "boss")
    with Served(folder, *FLAGS, *keys) as made:
        wait_until(lambda: all(one["state"] == "up" for one in known(made)), 60.0, "both are up")
        yield made


def known(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.get("/router/upstreams", BOSS)[1]["data"]
    return found


def ask(served: Served, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    status, told = served.post("/v1/completions", body, KEY)
    assert status == 200, told
    return told


def cached(told: Any) -> int:
    return int((told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def test_a_prefix_is_sent_where_it_is(replicas: Served) -> None:
    """Red when the router's keys are not those of the engines, or their news does not arrive."""
    beginnings = [f"{i} was a long time ago. " * 30 for i in range(6)]
    first = [ask(replicas, text) for text in beginnings]
    pages = sum(told["usage"]["prompt_tokens"] // 16 for told in first)

    def is_told() -> bool:
        all_ = known(replicas)
        return all(one["publishes_cache"] for one in all_) and (
            sum(one["known_prefix_pages"] for one in all_) >= pages
        )

    wait_until(is_told, 10.0, f"{pages} pages are known: {known(replicas)}")
    assert all(one["requests"] for one in known(replicas))
    again = [ask(replicas, text + "And then") for text in beginnings]
    for before, after in zip(first, again, strict=True):
        assert cached(before) == 0
        assert cached(after) >= before["usage"]["prompt_tokens"] // 16 * 16 - 16


def test_every_replica_says_the_same(replicas: Served) -> None:
    """Red when an answer depends on who gives it."""
    text = ask(replicas, "one of two")["choices"][0]["text"]
    for name in ("replica-0", "replica-1"):
        replicas.post(f"/router/drain/{name}", {}, BOSS)
        assert ask(replicas, "one of two")["choices"][0]["text"] == text
        replicas.post(f"/router/resume/{name}", {}, BOSS)


def serving(replicas: Served) -> list[psutil.Process]:
    children = psutil.Process(replicas.process.pid).children()
    return [one for one in children if "serve" in one.cmdline()]


def test_a_replica_that_dies_under_load(replicas: Served) -> None:
    """Red when an answer is begun twice, ends in silence, or is waited for in vain."""
    body = {"prompt": "what is said again", "temperature": 0, "ignore_eos": True}
    want = ask_whole(replicas, {**body, "max_tokens": 300})

    async def work() -> None:
        streams = [
            StreamClient(replicas.port, "/v1/completions", {**body, "max_tokens": 300}, KEY)
            for _ in range(8)
        ]
        whole = [
            asyncio.create_task(asyncio.to_thread(ask_whole, replicas, {**body, "max_tokens": 40}))
            for _ in range(8)
        ]
        reading = [asyncio.create_task(stream.run()) for stream in streams]
        while not any(stream.seen.num_events for stream in streams):
            await asyncio.sleep(0.01)
        assert len(serving(replicas)) == 2
        os.kill(serving(replicas)[0].pid, signal.SIGKILL)
        for number in range(12):  # whoever comes now does not notice
            await asyncio.to_thread(ask, replicas, f"{number} of twelve")
        for seen in await asyncio.wait_for(asyncio.gather(*reading), 60.0):
            # To its end, or told of the fault; never more than one answer.
            assert seen.status == 200 and seen.is_done != bool(seen.errors)
            assert seen.num_tokens == (300 if seen.is_done else 0)
        for text in await asyncio.wait_for(asyncio.gather(*whole), 60.0):
            assert want.startswith(text) and text  # its replica's death cost it nothing

    asyncio.run(work())
    wait_until(lambda: all(one["state"] == "up" for one in known(replicas)), 60.0, "up again")
    assert all(one["open_requests"] == one["pending_tokens"] == 0 for one in known(replicas))


def ask_whole(served: Served, body: dict[str, Any]) -> str:
    status, told = served.post("/v1/completions", body, KEY)
    assert status == 200, told
    return str(told["choices"][0]["text"])


def test_a_router_that_dies_under_load(replicas: Served) -> None:
    """Red when requests of a router that is gone run on, or were sent on more than once."""
    upstreams = [int(one.cmdline()[-1]) for one in serving(replicas)]  # ... --port N
    port = free_port()
    words = [word for one in upstreams for word in ("--upstream", f"http://127.0.0.1:{one}")]
    command = [sys.executable, "-m", "quire", "router", *words, "--port", str(port)]
    engines = [at_port(replicas, one) for one in upstreams]
    before = sum(accepted(engine) for engine in engines)
    body = {"prompt": "a long answer", "max_tokens": 3_000, "ignore_eos": True}

    async def work(router: subprocess.Popen[bytes]) -> None:
        streams = [StreamClient(port, "/v1/completions", body, KEY) for _ in range(6)]
        for stream in streams:
            await stream.open()
        reading = [asyncio.create_task(stream.read()) for stream in streams]
        while not all(stream.seen.num_events for stream in streams):
            await asyncio.sleep(0.01)
        router.kill()
        for seen in await asyncio.wait_for(asyncio.gather(*reading), 20.0):
            assert not seen.is_done

    with subprocess.Popen(command, env=with_boss()) as router:
        wait_until(lambda: answers(port), 60.0, "the router is ready")
        asyncio.run(work(router))
    for engine in engines:
        wait_until(lambda engine=engine: is_idle(engine), 15.0, "nothing runs for nobody")
    assert sum(accepted(engine) for engine in engines) == before + 6
    with subprocess.Popen(command, env=with_boss()) as router:  # another one takes its place
        wait_until(lambda: answers(port), 60.0, "the router is ready")
        assert ask_whole(at_port(replicas, port), {**body, "max_tokens": 4})
        router.terminate()
        assert router.wait(40.0) == 0


def at_port(served: Served, port: int) -> Served:
    """The same server by another of its addresses."""
    other = copy(served)
    other.port, other.url = port, f"http://127.0.0.1:{port}"
    return other


def with_boss() -> dict[str, str]:
    return {**os.environ, "QUIRE_ADMIN_API_KEY": "boss"}


def answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status == 200
    except OSError:
        return False


def figure(served: Served, name: str) -> float:
    lines = str(served.get("/metrics", KEY)[1]).splitlines()
    return float(next(line for line in lines if line.startswith(f"quire:{name}")).split()[-1])


def accepted(served: Served) -> float:
    return figure(served, "requests_accepted_total")


def is_idle(served: Served) -> bool:
    return all(
        figure(served, name) == 0 for name in ("num_requests_running", "kv_cache_usage_perc")
    )


def test_the_end_of_all(replicas: Served) -> None:
    """The last test of this file. Red when something outlives the process that was started."""
    family = psutil.Process(replicas.process.pid).children(recursive=True)
    assert len(family) >= 6
    replicas.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10.0)
    assert not alive

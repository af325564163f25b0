"""Two replicas behind one address, from outside: one server to everybody who asks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Served, wait_until
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


def test_a_replica_that_dies(replicas: Served) -> None:
    """Red when a client notices the death of one that was not answering it, or it stays dead."""
    children = psutil.Process(replicas.process.pid).children()
    serving = [one for one in children if "serve" in one.cmdline()]
    assert len(serving) == 2
    os.kill(serving[0].pid, signal.SIGKILL)
    for number in range(12):
        ask(replicas, f"{number} of twelve")
    wait_until(lambda: all(one["state"] == "up" for one in known(replicas)), 60.0, "up again")


def test_the_end_of_all(replicas: Served) -> None:
    """The last test of this file. Red when something outlives the process that was started."""
    family = psutil.Process(replicas.process.pid).children(recursive=True)
    assert len(family) >= 6
    replicas.process.kill()
    _, alive = psutil.wait_procs(family, timeout=10.0)
    assert not alive

"""`quire deploy` on a real Ray of this machine: streams, a rolling update, the end. Needs Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Served, free_port, wait_until
from tests.tiny_folder import write_tiny_folder

pytest.importorskip("ray")

FLAGS = ("--device", "cpu", "--load-format", "dummy", "--no-store", "--seed", "0")
START_S = 420.0  # Ray alone takes 10 s on an idle machine, and yields to everybody else


class Deployed(Served):
    """What `quire deploy` made, as an operator sees it."""

    def __init__(self, words: list[str], port: int, log: Path) -> None:
        self.port, self.log = port, log
        self.url = f"http://127.0.0.1:{port}/tiny"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire", "deploy", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
            )


@contextmanager
def deployed(*words: str, log: Path) -> Iterator[Deployed]:
    port = free_port()
    made = Deployed([*words, *FLAGS, "--route", "/tiny", "--port", str(port)], port, log)
    try:
        wait_until(made.is_ready, START_S, f"ready; log: {made.tail()}")
        yield made
    finally:
        made.stop(120.0)


def streamed(served: Served, count: int) -> str:
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": count, "stream": True}
    return str(served.post("/v1/completions", {**body, "ignore_eos": True}, timeout=120.0)[1])


def test_a_deployment_and_its_end(tmp_path: Path) -> None:
    """Red when Ray's calls no longer fit, an answer is lost at the end, or a process stays."""
    folder = write_tiny_folder(tmp_path / "model", max_position_embeddings=4_096)
    with deployed(str(folder), "--name", "tiny", log=tmp_path / "log") as made:
        status, told = made.complete("hello", temperature=0)
        assert status == 200 and told["usage"]["completion_tokens"] == 4
        assert streamed(made, 8).rstrip().endswith("data: [DONE]")
        assert made.get("/nowhere")[0] == 404
        assert "quire:num_requests_waiting" in made.get("/metrics")[1]
        family = psutil.Process(made.process.pid).children(recursive=True)
        engines = [one for one in family if "quire.server.engine_main" in " ".join(one.cmdline())]
        assert len(engines) == 1

        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(streamed(made, 3_000)))
        asking.start()
        wait_until(lambda: running(made) == 1, 30.0, "the stream has begun")
        made.process.send_signal(signal.SIGTERM)
        asking.join(120.0)
        assert answers and answers[0].rstrip().endswith("data: [DONE]")
        assert made.process.wait(120.0) == 0
        _, alive = psutil.wait_procs(family, timeout=30.0)
        assert not alive


def running(served: Served) -> float:
    counts = served.counts()
    return next(value for name, value in counts.items() if name.startswith("num_requests_running"))

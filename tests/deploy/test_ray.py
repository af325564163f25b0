"""`quire deploy` on a real Ray of this machine: streams, a rolling update, the end. Needs Ray."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


class Cluster:
    """A Ray of this machine that outlives whoever deploys to it."""

    def __init__(self) -> None:
        self.port, self.http_port = free_port(), free_port()
        flags = ("--num-cpus=4", "--include-dashboard=false", "--disable-usage-stats")
        self.folder = tempfile.mkdtemp(prefix="quire-ray-")  # short: sockets lie in it
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **token}
        words = ["start", "--head", "--block", f"--port={self.port}", *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words, f"--temp-dir={self.folder}"],
            env=self._env,
            stdout=subprocess.DEVNULL,
        )

    def deploy(self, *words: str) -> None:
        where = ("--address", f"127.0.0.1:{self.port}", "--name", "tiny", "--route", "/tiny")
        command = [sys.executable, "-m", "quire", "deploy", *words, *where]
        command += ["--port", str(self.http_port)]
        subprocess.run(command, env=self._env, check=True, timeout=START_S)

    def running(self, module: str) -> set[psutil.Process]:
        """Processes of a replica; `module`: of what was started so."""
        found = set()
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if module in one.cmdline():
                    found.add(one)
        return found

    def stop(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(60.0)
        finally:
            for one in family:
                with suppress(psutil.Error):
                    one.kill()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.stop()


class ByRay(Served):
    """What a cluster serves."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}/tiny"


def test_an_update_under_streams_and_a_killed_replica(cluster: Cluster, tmp_path: Path) -> None:
    """Red when an update cuts a stream off, or changes nothing; when a replica that is gone is not
    replaced; when an application that is deleted leaves a process."""
    folder = str(write_tiny_folder(tmp_path / "model", max_position_embeddings=4_096))
    served, engine = ByRay(cluster.http_port), "quire.server.engine_main"
    wait_until(lambda: listens(cluster.port), START_S, "Ray is up")
    cluster.deploy(folder, *FLAGS)
    (before,) = cluster.running(engine)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(streamed(served, 2_000))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: running(served) == 6, 60.0, "the streams have begun")
    cluster.deploy(folder, *FLAGS, "--max-num-seqs", "8")
    for thread in threads:
        thread.join(START_S)
    assert len(answers) == 6
    assert all(answer.rstrip().endswith("data: [DONE]") for answer in answers)
    wait_until(lambda: not before.is_running(), START_S, "the old replica is gone")
    (after,) = cluster.running(engine)
    assert after != before and served.complete("hello")[0] == 200

    (server,) = (one for one in cluster.running("serve") if "quire" in one.cmdline())
    server.kill()
    wait_until(lambda: not after.is_running(), 60.0, "its engine ends with it")
    wait_until(lambda: answers_now(served), START_S, "another replica answers")
    cluster.deploy("--delete")
    wait_until(lambda: not cluster.running(engine), START_S, "no engine is left")


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def answers_now(served: Served) -> bool:
    try:
        return served.complete("hello")[0] == 200
    except OSError:
        return False

"""A real `quire serve` in processes of its own, with a tiny random model, tested from outside."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

START_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds it took; fails the test when it takes longer."""
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - begun


class Served:
    """The server as an operator sees it: a process, a port, a log."""

    def __init__(self, model: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkstemp(prefix="quire-serve-", suffix=".log")[1])
        words = [sys.executable, "-m", "quire", "serve", str(model), "--port", str(self.port)]
        # A seed: what a random model draws must end in time, today and tomorrow.
        words += ["--seed", "0", "--log-format", "json", *flags]
        if model.suffix != ".toml":
            words += ["--served-model-name", "tiny"]
        if not {"--store", "--no-store"} & set(flags):
            words += ["--store", tempfile.mkdtemp(prefix="quire-store-")]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )

    def __enter__(self) -> Served:
        try:
            wait_until(self.is_ready, START_S, f"ready; log: {self.tail()}")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, seconds: float = 40.0) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def tail(self, count: int = 2_000) -> str:
        return self.log.read_text(errors="replace")[-count:]

    # ------------------------------------------------------------ processes

    def child(self, module: str) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children():
            if f"quire.server.{module}" in " ".join(child.cmdline()):
                return child
        raise AssertionError(f"no {module} process")

    @property
    def engine(self) -> psutil.Process:
        return self.child("engine_main")

    @property
    def api(self) -> psutil.Process:
        return self.child("api_main")

    # ------------------------------------------------------------ HTTP

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended: {self.tail()}"
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return self.call("GET", path, None, headers)

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None, timeout: float = 60.0
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.call("POST", path, data, headers, timeout)

    def call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
    ) -> tuple[int, Any]:
        """(status, decoded JSON or text)."""
        request = urllib.request.Request(
            self.url + path,
            data=data,
            method=method,
            headers={"content-type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read())

    def complete(self, prompt: str = "hello", **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, **fields})

    # ------------------------------------------------------------ what the engine holds

    def counts(self) -> dict[str, float]:
        """The engine's own figures, read through the metrics."""
        found: dict[str, float] = {}
        for line in str(self.get("/metrics")[1]).splitlines():
            if line.startswith("quire:") and "_bucket" not in line:
                name, _, value = line.rpartition(" ")
                found[name.removeprefix("quire:")] = float(value)
        return found

    def num_live_pages(self) -> float:
        return next(v for k, v in self.counts().items() if k.startswith("kv_cache_usage_perc"))

    def num_prompt_tokens(self) -> float:
        return sum(v for k, v in self.counts().items() if k.startswith("prompt_tokens_total"))

    def wait_idle(self, seconds: float = 15.0) -> None:
        """No page is held and nobody waits: nothing leaked."""

        def is_idle() -> bool:
            counts = self.counts()
            keys = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return all(v == 0 for k, v in counts.items() if k.startswith(keys))

        wait_until(is_idle, seconds, f"idle; {self.counts()}")


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")

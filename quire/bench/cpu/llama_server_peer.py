"""llama-server, with as many slots as there are requests and one connection for each."""

from __future__ import annotations

import atexit
import http.client
import json
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from quire.bench.cpu.work import Prompts, Setup

START_S = 120


class LlamaServerPeer:
    def __init__(self, setup: Setup) -> None:
        program = shutil.which("llama-server")
        assert program, "llama-server is not on the PATH"
        self.port = _free_port()
        options = {
            "--model": setup.model,
            "--port": self.port,
            "--threads": setup.threads,
            "--parallel": setup.num_seqs,
            "--ctx-size": setup.num_seqs * setup.context,
        }
        words = [str(word) for pair in options.items() for word in pair]
        self.server = subprocess.Popen(
            [program, *words, "--no-webui"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(self._end)
        self._wait()

    def _end(self) -> None:
        self.server.kill()
        self.server.wait()  # its CPU time counts as ours

    def generate(self, prompts: Prompts, lengths: list[int]) -> float:
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            made = list(pool.map(self._complete, prompts, lengths))
            seconds = time.perf_counter() - start
        assert made == lengths, f"asked for {lengths} tokens, got {made}"
        return seconds

    def _complete(self, prompt: list[int], length: int) -> int:
        asked = {
            "prompt": prompt,
            "n_predict": length,
            "ignore_eos": True,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        answer = json.loads(self._ask("POST", "/completion", json.dumps(asked)))
        return int(answer["tokens_predicted"])

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            said = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ConnectionError(f"llama-server answers {response.status}: {said[:200]!r}")
        return said

    def _wait(self) -> None:
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up and self.server.poll() is None:
            try:
                self._ask("GET", "/health")
            except OSError:  # not listening yet, or still loading
                time.sleep(0.1)
            else:
                return
        raise TimeoutError(f"llama-server was not ready after {START_S} s, or ended")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def open_peer(setup: Setup) -> LlamaServerPeer:
    return LlamaServerPeer(setup)

"""Two real servers and a router in front: what a client gets is what one server would say."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Served, free_port, wait_until

BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What a quire is, in very many words. " * 3}],
    "max_tokens": 9,
    "temperature": 0,
}


class Apart:
    """A server that prefills, one that decodes, and the router, each in processes of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        pages = f"127.0.0.1:{free_port()}"
        common = ["--device", "cpu", "--page-size", "4", "--dtype", "float32", "--no-page"]
        common += ["--kv-secret", str(folder / "secret"), "--generation-config", "none"]
        self.prefill = Served(model, "--role", "prefill", "--kv-listen", pages, *common)
        self.decode = Served(model, "--role", "decode", "--kv-peers", pages, *common)
        self.port = free_port()
        words = ["router", "--port", str(self.port), "--prefill", self.prefill.url]
        words += ["--upstream", self.decode.url]
        self.router = subprocess.Popen([sys.executable, "-m", "quire", *words])

    def __enter__(self) -> Apart:
        for server in (self.prefill, self.decode):
            server.__enter__()
        self.direct, self.decode.url = self.decode.url, f"http://127.0.0.1:{self.port}"
        wait_until(self.are_up, 20, "the router knows both")
        return self

    def are_up(self) -> bool:
        if not self.decode.is_ready():
            return False
        known = self.decode.get("/router/upstreams")[1]["data"]
        return [one["state"] for one in known] == ["up", "up"]

    def __exit__(self, *_: object) -> None:
        self.router.terminate()
        assert self.router.wait(10) == 0
        for server in (self.prefill, self.decode):
            server.stop()

    def ask(self, **fields: Any) -> Any:
        """Through the router, which has taken the decoding server's address here."""
        status, answer = self.decode.post("/v1/chat/completions", BODY | fields)
        assert status == 200, answer
        return answer

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.direct + "/metrics") as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line.startswith(f"quire:{name}")]
        return float(lines[0].split()[-1])


@pytest.fixture(scope="module")
def apart(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with Apart(tiny_folder, tmp_path_factory.mktemp("apart")) as made:
        yield made


def content(stream: str) -> str:
    events = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_whole_and_streamed_through_the_router(apart: Apart) -> None:
    """The prompt is computed by one server and loaded by the other; the text is the same."""
    whole = apart.ask()
    num_prompt = whole["usage"]["prompt_tokens"]
    num_cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == min(num_prompt // 4 * 4, num_prompt - 1)
    wait_until(lambda: apart.metric('kv_tier_loads_total{tier="remote"}') > 20, 5, "counted")
    streamed = apart.ask(stream=True, cache_salt="other")
    assert content(streamed) == whole["choices"][0]["message"]["content"]
    status, alone = apart.prefill.post("/v1/chat/completions", BODY)
    assert status == 200
    assert alone["choices"][0]["message"] == whole["choices"][0]["message"]


def test_tickets_of_clients_are_not_passed_on(apart: Apart) -> None:
    """Red when a client could make an engine prefill, or pull, by a header of its own."""
    headers = {"x-quire-kv-ticket": "127.0.0.1:1/" + "0" * 32 + "/1/1", "x-quire-prefill": "1"}
    status, answer = apart.decode.post(
        "/v1/chat/completions", BODY | {"cache_salt": "third"}, headers
    )
    assert status == 200 and answer["usage"]["completion_tokens"] == 9


def test_other_requests_pass_as_they_are(apart: Apart) -> None:
    assert apart.decode.get("/v1/models")[1]["data"][0]["id"] == "tiny"
    status, answer = apart.decode.post("/v1/chat/completions", b"{")
    assert status == 400 and "error" in answer
    status, answer = apart.decode.post(
        "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "model": "tiny"}
    )
    assert status == 200 and len(answer["choices"]) == 2


def test_prefill_dies_and_nobody_notices(apart: Apart) -> None:
    """The last of this file: the engine that prefills is killed, then its server is gone."""
    want = apart.ask(cache_salt="fourth")["choices"][0]["message"]
    apart.prefill.engine.kill()
    assert apart.ask(cache_salt="fifth")["choices"][0]["message"] == want
    apart.prefill.process.kill()
    apart.prefill.process.wait()
    assert apart.ask(cache_salt="sixth")["choices"][0]["message"] == want
    assert apart.decode.get("/ready")[0] == 200

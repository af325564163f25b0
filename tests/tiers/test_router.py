"""Two real servers and a router in front: what a client gets is what one server would say."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import BadRequest
from quire.router.messages import BadMessage, read_request
from quire.router.router import Engine, Router
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
        words = ["route", "--port", str(self.port), "--prefill", self.prefill.url]
        words += ["--decode", self.decode.url]
        self.router = subprocess.Popen([sys.executable, "-m", "quire", *words])

    def __enter__(self) -> Apart:
        for server in (self.prefill, self.decode):
            server.__enter__()
        self.direct, self.decode.url = self.decode.url, f"http://127.0.0.1:{self.port}"
        wait_until(self.decode.is_ready, 20, "the router answers")
        return self

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
        text = self.decode.get("/metrics")[1]
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


# ---------------------------------------------------------------- without servers


def parsed(raw: bytes) -> Any:
    async def read() -> Any:
        reader = asyncio.StreamReader(limit=64 << 10)
        reader.feed_data(raw)
        reader.feed_eof()
        return await read_request(reader)

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 411),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nspaced : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n", 431),
    ],
)
def test_ambiguous_requests_are_refused(raw: bytes, status: int) -> None:
    with pytest.raises(BadMessage) as caught:
        parsed(raw)
    assert caught.value.status == status


def test_nobody_decodes() -> None:
    """A router whose engines are all gone says so."""

    async def ask() -> bytes:
        router = Router([Engine.of("127.0.0.1:1")], [Engine.of("http://127.0.0.1:1")])
        server = await asyncio.start_server(router.handle, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await reader.read()
            writer.close()
        return answer

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 502")


def test_a_client_that_leaves_ends_the_work() -> None:
    """Red when an engine goes on for a client of the router that is gone."""

    async def run() -> bool:
        closed = asyncio.Event()

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst")
            while await reader.read(100):
                pass
            closed.set()
            writer.close()

        upstream = await asyncio.start_server(engine, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
        router = Router([], [Engine.of(url)])
        server = await asyncio.start_server(router.handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"first")
        assert router.decode[0].num_open == 1
        writer.close()
        async with asyncio.timeout(5):
            await closed.wait()
        server.close()
        upstream.close()
        return router.decode[0].num_open == 0

    assert asyncio.run(run())


@pytest.mark.parametrize("url", ["ftp://x:1", "http://x", "http://x:99999", "http://x:1/v1", ""])
def test_engines_have_plain_addresses(url: str) -> None:
    with pytest.raises(BadRequest, match="http://10"):
        Engine.of(url)

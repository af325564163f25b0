"""Requests of many parts through the app: let in as one, fed to the engine piece by piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quire.server.settings import Limits
from tests.server.asgi import call
from tests.server.fakes import Bench, FakeLink
from tests.server.test_generation import LONG, held, nothing, run, slow_bench, start, until


class Counting(FakeLink):
    """Knows the most sequences that were in the engine at one time."""

    most_open = 0

    def open(self, requests: Any, is_background: bool = False) -> Any:
        made = super().open(requests, is_background)
        self.most_open = max(self.most_open, self.num_open)
        return made


def counting_bench(**settings: Any) -> Bench:
    bench = Bench(**settings)
    link = Counting(bench.link.tokenizer)
    link.on_hello, link.hello = bench.link.on_hello, bench.link.hello
    link.pool = lambda ids: [float(len(ids)), 1.0]
    bench.link = bench.server.link = link  # type: ignore[assignment]
    return bench


# ------------------------------------------------------------ what was refused for ever


def test_a_keys_limit_counts_requests() -> None:
    """Red when three inputs of one request are three requests of its key."""
    bench = counting_bench(api_keys=("k",), limits=Limits(max_requests_per_key=2))
    reply = bench.post("/v1/embeddings", {"input": ["a", "b", "c"]}, authorization="Bearer k")
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_and_answers_with_the_usual_settings(stream: bool) -> None:
    """Red when 64 prompts x n = 8 are refused by an idle server."""
    bench = counting_bench()
    body = {"prompt": [f"p{i}" for i in range(64)], "n": 8, "max_tokens": 1, "stream": stream}
    reply = bench.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    if stream:
        lines = [line[6:] for line in reply.text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
        assert {c["index"] for c in choices if c["finish_reason"]} == set(range(512))
        assert reply.text.endswith("data: [DONE]\n\n")
    else:
        assert [c["index"] for c in reply.json()["choices"]] == list(range(512))
    assert bench.link.most_open == 16  # type: ignore[attr-defined]  # two batches of 8
    assert held(bench) == nothing()


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/embeddings", {"input": [f"{i}" for i in range(9)]}),
        ("/v1/completions", {"prompt": [f"{i}" for i in range(9)], "max_tokens": 2}),
        ("/score", {"text_1": "a", "text_2": [f"{i}" for i in range(9)]}),
        ("/pooling", {"input": [f"{i}" for i in range(9)]}),
    ],
)
def test_more_inputs_than_places(path: str, body: dict[str, Any]) -> None:
    """Red when nine inputs with four places and four queued are refused by an idle server."""
    bench = counting_bench(limits=Limits(max_queued_requests=4))
    bench.server.admission.max_running = 4
    reply = bench.post(path, body)
    assert reply.status_code == 200, reply.text
    assert bench.link.most_open <= 8  # type: ignore[attr-defined]
    assert held(bench) == nothing()


def test_answers_keep_their_places() -> None:
    """Red when what finishes first is told first: vectors belong to their inputs."""
    bench = counting_bench()
    inputs = ["x" * (1 + i % 7) for i in range(100)]
    said = bench.post("/v1/embeddings", {"input": inputs, "normalize": False}).json()
    sizes = [len(bench.link.tokenizer.encode(text)) for text in inputs]
    assert [d["embedding"][0] for d in said["data"]] == sizes
    assert said["usage"]["prompt_tokens"] == sum(sizes)


# ------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("/v1/completions", {"prompt": ["a"] * 65}, "got 65 prompts, want at most 64"),
        ("/v1/completions", {"prompt": "a", "n": 17}, "n=17"),
        ("/v1/embeddings", {"input": ["a"] * 2_049}, "got 2049 inputs, want at most 2048"),
    ],
)
def test_a_request_is_bounded_by_name(path: str, body: dict[str, Any], words: str) -> None:
    """Red when a request that can never be is told to come back, or no limit is named."""
    bench = counting_bench()
    reply = bench.post(path, body)
    assert reply.status_code == 400 and "retry-after" not in reply.headers
    assert words in reply.json()["error"]["message"]
    assert bench.link.submitted == []


def test_a_bad_part_ends_the_request_and_frees_the_rest() -> None:
    """Red when the hundredth input's mistake leaves the others' room taken."""
    bench = counting_bench()
    reply = bench.post("/v1/embeddings", {"input": [[1]] * 100 + [[10**6]]})
    assert reply.status_code == 400 and "1000000" in reply.json()["error"]["message"]
    assert held(bench) == nothing()


# ------------------------------------------------------------ with others, and the end


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_list_holds_up_nobody(stream: bool) -> None:
    """Red when the parts that wait fill the engine's queue, or stay behind when the client goes."""

    async def work() -> None:
        bench = slow_bench()
        bench.server.admission.max_running = 2
        long = start(bench, LONG | {"prompt": ["a"] * 64, "stream": stream})
        await until(lambda: held(bench)["engine"] == 4)
        short = start(bench, LONG)
        await until(lambda: held(bench)["engine"] == 5)
        assert held(bench)["places"] == 2
        for made in (long, short):
            made.leave()
            await made.end()
        assert held(bench) == nothing()

    run(work)


def test_a_draining_server_finishes_the_parts_that_wait() -> None:
    """Red when a request that was let in is refused half-way."""

    async def work() -> None:
        bench = slow_bench()
        bench.server.admission.max_running = 2
        made = start(bench, LONG | {"prompt": ["a"] * 10, "max_tokens": 3})
        await until(lambda: held(bench)["engine"] == 4)
        bench.server.is_draining = True
        late = await call(bench.app, "POST", "/v1/completions", LONG)
        assert late.status == 503 and late.json()["error"]["code"] == "draining"
        bench.link.gate.set()  # type: ignore[attr-defined]
        assert (await made.end()).status == 200
        assert len(made.json()["choices"]) == 10
        assert held(bench) == nothing()

    run(work)


def test_one_deadline_for_all_parts() -> None:
    """Red when every part may take as long as a whole request."""

    async def work() -> None:
        bench = slow_bench()
        bench.server.admission.max_running = 1
        made = start(bench, LONG | {"prompt": ["a"] * 5, "timeout": 5.0})
        await until(lambda: held(bench)["engine"] == 2)
        await asyncio.sleep(0.05)
        first = {generation.deadline for generation in bench.server.watchman.generations}
        bench.link.gate.set()  # type: ignore[attr-defined]
        bench.link.is_slow = True
        await until(lambda: len(bench.link.submitted) == 5)
        last = {generation.deadline for generation in bench.server.watchman.generations}
        assert len(first) == 1 and last == first
        assert (await made.end()).status == 200

    run(work)

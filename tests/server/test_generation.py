"""One generation through the app: every way it can end gives back all it held."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quire.errors import EngineDead
from quire.server.settings import Limits
from tests.server.asgi import Call, call
from tests.server.fakes import Bench, FakeLink

LONG = {"prompt": "x", "max_tokens": 1_000}


class SlowLink(FakeLink):
    """Gives a token when told to, or dies."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.answer = "a" * 2_000
        self.gate = asyncio.Event()

    async def _feed(self, request: Any, tap: Any) -> None:
        await self.gate.wait()
        await super()._feed(request, tap)


def slow_bench(**settings: Any) -> Bench:
    bench = Bench(**settings)
    link = SlowLink(bench.link.tokenizer)
    link.on_hello = bench.link.on_hello
    link.hello = bench.link.hello
    bench.link = bench.server.link = link  # type: ignore[assignment]
    return bench


def held(bench: Bench) -> dict[str, int]:
    server = bench.server
    return {
        "places": server.admission.num_open,
        "tokens": server.admission.num_open_tokens,
        "generations": len(server.watchman.generations),
        "requests": server.watchman.num_requests,
        "engine": bench.link.num_open,
        "bodies": bench.app.room.num_bytes,
    }


def nothing() -> dict[str, int]:
    return dict.fromkeys(("places", "tokens", "generations", "requests", "engine", "bodies"), 0)


def start(bench: Bench, body: dict[str, Any], path: str = "/v1/completions") -> Call:
    made = Call(bench.app, "POST", path)
    made.send_body(body)
    return made


async def until(is_so: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.001)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))  # type: ignore[arg-type]
    gc.collect()  # what a task left behind is reported here, not in somebody else's test


# ------------------------------------------------------------ leaving


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_while_queued_frees_everything(stream: bool, n: int) -> None:
    """Red when only streams notice that nobody is there, or a place stays taken."""

    async def work() -> None:
        bench = slow_bench()
        made = start(bench, LONG | {"stream": stream, "n": n})
        await until(lambda: held(bench)["engine"] == n)
        assert held(bench)["places"] == 1
        made.leave()
        await made.end()
        assert held(bench) == nothing()

    run(work)


def test_a_client_that_leaves_in_mid_stream() -> None:
    async def work() -> None:
        bench = slow_bench()
        bench.link.gate.set()  # type: ignore[attr-defined]
        made = start(bench, LONG | {"stream": True})
        await made.until(b"data: ")
        made.leave()
        await made.end()
        assert not made.is_over
        assert held(bench) == nothing()

    run(work)


def test_a_client_that_leaves_before_its_body_is_there() -> None:
    async def work() -> None:
        bench = slow_bench()
        made = Call(bench.app, "POST", "/v1/completions")
        made.send_body(b'{"prompt": ', more=True)
        await until(lambda: bench.app.room.num_bytes > 0)
        made.leave()
        await made.end()
        assert made.status == 400 and held(bench) == nothing()
        assert bench.link.submitted == []

    run(work)


def test_many_prompts_of_one_request_end_together() -> None:
    async def work() -> None:
        bench = slow_bench()
        made = start(bench, LONG | {"prompt": ["a", "b", "c"], "stream": True})
        await until(lambda: held(bench)["engine"] == 3)
        made.leave()
        await made.end()
        assert held(bench) == nothing()

    run(work)


# ------------------------------------------------------------ the engine goes


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_engine_dies_in_mid_stream(path: str) -> None:
    """Red when a stream just stops: the client could not tell it from the end."""
    bench = Bench()
    bench.link.dies_after = 3
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = bench.post(path, body)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in answer.text
    assert held(bench) == nothing()


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_dies_before_the_first_token(stream: bool) -> None:
    bench = Bench()
    bench.link.dies_after = 0
    answer = bench.post("/v1/completions", {"prompt": "x", "stream": stream})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert held(bench) == nothing()


def test_there_is_no_engine() -> None:
    bench = Bench()
    bench.link.hello = None
    answer = bench.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503 and "loading" in answer.json()["error"]["message"]
    assert bench.get("/ready").status_code == 503
    assert bench.get("/health").status_code == 200
    assert held(bench) == nothing()


def test_an_engine_that_goes_between_admission_and_submission() -> None:
    """Red when a place is lost each time the engine dies at the wrong moment."""
    bench = Bench()

    def refuse(requests: Any, is_background: bool) -> Any:
        raise EngineDead("gone")

    bench.link.open = refuse  # type: ignore[method-assign]
    for _ in range(3):
        assert bench.post("/v1/completions", {"prompt": "x"}).status_code == 503
    assert held(bench) == nothing()


# ------------------------------------------------------------ limits


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline(stream: bool) -> None:
    async def work() -> None:
        bench = slow_bench()
        made = start(bench, LONG | {"stream": stream, "timeout": 0.05})
        await until(lambda: held(bench)["engine"] == 1)
        await asyncio.sleep(0.06)
        bench.server.watchman.look(asyncio.get_running_loop().time())
        await made.end()
        assert made.status == 504, made.body
        assert made.json()["error"]["code"] == "deadline_exceeded"
        assert held(bench) == nothing()

    run(work)


def test_a_client_cannot_ask_for_more_time_than_there_is() -> None:
    async def work() -> None:
        bench = slow_bench(limits=Limits(request_timeout_s=5.0))
        made = start(bench, LONG | {"timeout": 1e9})
        await until(lambda: held(bench)["engine"] == 1)
        (generation,) = bench.server.watchman.generations
        assert generation.timeout_s == 5.0
        made.leave()
        await made.end()

    run(work)


def test_a_full_server_says_when_to_come_back() -> None:
    """Red when the queue grows without end, or a refused request costs a place."""

    async def work() -> None:
        bench = slow_bench(limits=Limits(max_queued_requests=2))
        bench.server.admission.max_running = 1
        open_calls = [start(bench, LONG) for _ in range(3)]
        await until(lambda: held(bench)["places"] == 3)
        for _ in range(5):
            refused = await call(bench.app, "POST", "/v1/completions", LONG)
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        assert held(bench)["places"] == 3
        assert bench.server.metrics.summary()["requests"]["rejected"]["queue_full"] == 5
        for made in open_calls:
            made.leave()
            await made.end()
        assert held(bench) == nothing()
        bench.link.gate.set()  # type: ignore[attr-defined]
        assert (await call(bench.app, "POST", "/v1/completions", LONG)).status == 200

    run(work)


def test_a_reader_that_does_not_read_is_dropped_and_the_engine_told() -> None:
    async def work() -> None:
        bench = slow_bench()
        bench.link.gate.set()  # type: ignore[attr-defined]
        made = start(bench, LONG | {"stream": True})
        await made.until(b"data: ")
        made.can_write.clear()
        (request,) = bench.server.watchman._requests.values()
        await until(lambda: request.sending_since is not None)
        bench.server.watchman.look(request.sending_since + 31)
        await made.end()
        assert not made.is_over
        assert held(bench) == nothing()

    run(work)


def test_a_draining_server_finishes_but_takes_nothing_new() -> None:
    async def work() -> None:
        bench = slow_bench()
        made = start(bench, LONG | {"max_tokens": 5})
        await until(lambda: held(bench)["engine"] == 1)
        bench.server.is_draining = True
        late = await call(bench.app, "POST", "/v1/completions", LONG)
        assert late.status == 503 and late.json()["error"]["code"] == "draining"
        assert (await call(bench.app, "GET", "/ready")).status == 503
        assert (await call(bench.app, "GET", "/live")).status == 200
        bench.link.gate.set()  # type: ignore[attr-defined]
        assert (await made.end()).status == 200
        assert held(bench) == nothing()

    run(work)


@pytest.mark.parametrize("stream", [False, True])
def test_an_operator_ends_a_request_and_its_client_is_told(stream: bool) -> None:
    """Red when /admin/abort leaves the client with an empty answer."""

    async def work() -> None:
        bench = slow_bench()
        made = Call(bench.app, "POST", "/v1/completions", {"x-request-id": "mine"})
        made.send_body(LONG | {"stream": stream})
        await until(lambda: held(bench)["engine"] == 1)
        done = await call(bench.app, "POST", "/admin/abort", {"request_id": "other"})
        assert done.json() == {"aborted": 0}
        done = await call(bench.app, "POST", "/admin/abort", {"request_id": "mine"})
        assert done.json() == {"aborted": 1}
        await made.end()
        assert made.status == 503 and made.json()["error"]["code"] == "aborted"
        assert held(bench) == nothing()

    run(work)

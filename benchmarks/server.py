"""The server from outside: what HTTP costs, what idle connections hold, how fast faults heal.

Starts `quire serve` for each mode and prints one JSON line for it. Clients are raw sockets on one
event loop of this process, and share the machine with the server, as a note in each line says.

    python benchmarks/server.py throughput --model smollm2-135m-instruct --threads 2
    python benchmarks/server.py overhead idle recovery disconnect inside     # a tiny random model
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.harness import Served
from tests.e2e.raw import StreamClient, dial, request_bytes
from tests.tiny_folder import write_tiny_folder

CONCURRENCY = 32
PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes on to say that "


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve and how much of it to ask for."""

    model: Path
    flags: tuple[str, ...]
    is_tiny: bool
    threads: int
    num_requests: int
    num_tokens: int
    num_streams: int

    def body(self, number: int, **fields: Any) -> dict[str, Any]:
        """One of the requests; prompts differ from their first word on, so none is cached."""
        return {
            "prompt": f"{number} {PROMPT}",
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }

    @contextmanager
    def served(self, *more: str) -> Iterator[Served]:
        flags = ("--threads", str(self.threads), *self.flags, *more)
        with Served(self.model, *flags) as made:
            yield made


# ------------------------------------------------------------ clients


async def streamed(port: int, body: dict[str, Any]) -> int:
    """Send one request and read its stream to the end, looking as little as possible at it.

    Returns the number of tokens; raises when the stream broke.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/v1/completions", body, headers={"Connection": "close"}))
    tail = b""
    while part := await reader.read(1 << 16):
        tail = (tail + part)[-2_000:]
    writer.close()
    if b"data: [DONE]" not in tail:
        raise RuntimeError(f"a stream ended early: {tail[-300:]!r}")
    usage = tail[tail.rindex(b'"completion_tokens":') :].split(b":")[1]
    return int(usage.split(b",")[0].rstrip(b"}"))


async def load(served: Served, plan: Plan) -> tuple[int, float]:
    """(tokens, seconds) of the plan's requests, so many at a time."""
    numbers = iter(range(plan.num_requests))

    async def worker() -> int:
        return sum([await streamed(served.port, plan.body(number)) for number in numbers])

    begun = time.perf_counter()
    tokens = await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return sum(tokens), time.perf_counter() - begun


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Watching:
    """One open /inside stream, and the newest picture that came over it."""

    def __init__(self, served: Served) -> None:
        self._connection = dial(served.port)
        self._connection.sendall(request_bytes("/inside?hz=10", method="GET"))
        self._rest = b""

    def counts(self, since: float) -> dict[str, Any]:
        """The engine's counts in the first picture drawn after that moment of the clock."""
        while True:
            while b"\n\n" not in self._rest:
                self._rest += self._connection.recv(1 << 20)
            event, _, self._rest = self._rest.partition(b"\n\n")
            found = event[event.find(b"data: ") + 6 :]
            picture = json.loads(found)
            if picture.get("t", 0.0) >= since:
                counts: dict[str, Any] = picture["counts"]
                return counts

    def close(self) -> None:
        self._connection.close()


# ------------------------------------------------------------ modes


def throughput(plan: Plan) -> dict[str, Any]:
    """The engine by itself, and the same work through HTTP."""
    offline = offline_tokens_per_s(plan)
    with plan.served() as served:
        asyncio.run(load(served, plan))  # warm
        tokens, seconds = asyncio.run(load(served, plan))
    return {
        "offline_tokens_per_s": round(offline, 1),
        "http_tokens_per_s": round(tokens / seconds, 1),
        "ratio": round(tokens / seconds / offline, 3),
    }


def offline_tokens_per_s(plan: Plan) -> float:
    from quire import LLM, SamplingParams

    llm = LLM(
        str(plan.model),
        max_num_seqs=CONCURRENCY,
        num_threads=plan.threads,
        **({"device": "cpu", "load_format": "dummy"} if plan.is_tiny else {}),
    )
    params = SamplingParams(max_tokens=plan.num_tokens, ignore_eos=True, temperature=0.0)
    prompts = [plan.body(number)["prompt"] for number in range(plan.num_requests)]
    seconds, tokens = 0.0, 0
    for _ in range(2):  # the first warms
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begun
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    del llm
    gc.collect()
    return tokens / seconds


def overhead(plan: Plan) -> dict[str, Any]:
    """CPU time of the API process for one streamed token."""
    with plan.served() as served:
        asyncio.run(load(served, plan))
        api, engine = served.api, served.engine
        before, engine_before, tokens, seconds = cpu_seconds(api), cpu_seconds(engine), 0, 0.0
        while tokens < 20_000 and seconds < 40.0:
            more, took = asyncio.run(load(served, plan))
            tokens, seconds = tokens + more, seconds + took
        spent, engine_spent = cpu_seconds(api) - before, cpu_seconds(engine) - engine_before
    return {
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "api_cpu_us_per_token": round(spent / tokens * 1e6, 1),
        "api_share_of_a_core": round(spent / seconds, 3),
        "engine_cpu_us_per_token": round(engine_spent / tokens * 1e6, 1),
    }


def idle(plan: Plan) -> dict[str, Any]:
    """Memory of the API process for each stream that is open and waits; the engine is paused."""
    num_streams = plan.num_streams
    limits = ("--max-queued-requests", str(2 * num_streams), "--queue-timeout", "600")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}

    async def work(served: Served) -> dict[str, Any]:
        api = served.api
        before = api.memory_info().rss
        clients = [
            StreamClient(served.port, "/v1/chat/completions", body) for _ in range(num_streams)
        ]
        begun = time.perf_counter()
        for some in range(0, num_streams, 50):
            await asyncio.gather(*(client.open() for client in clients[some : some + 50]))
        opened = time.perf_counter() - begun
        held = api.memory_info().rss
        begun = time.perf_counter()
        status, _ = await asyncio.to_thread(served.get, "/health")
        health = time.perf_counter() - begun
        assert status == 200 and all(client.seen.status == 200 for client in clients)
        for client in clients:
            client.hang_up()
        begun = time.perf_counter()
        await asyncio.to_thread(served.wait_idle, 180.0)
        left = time.perf_counter() - begun
        await asyncio.sleep(1.0)
        return {
            "streams": num_streams,
            "kb_per_stream": round((held - before) / num_streams / 1024, 1),
            "kb_per_stream_after": round((api.memory_info().rss - before) / num_streams / 1024, 1),
            "open_s": round(opened, 2),
            "health_ms_meanwhile": round(health * 1e3, 1),
            "all_gone_s": round(left, 2),
        }

    with plan.served(*limits) as served:
        served.complete()
        served.post("/admin/pause", {})
        return asyncio.run(work(served))


def recovery(plan: Plan, times: int = 3) -> dict[str, Any]:
    """From SIGKILL of the engine to the next good answer; loading the model is most of it."""
    seconds = []
    with plan.served() as served:
        for _ in range(times):
            served.complete()
            begun = time.perf_counter()
            os.kill(served.engine.pid, signal.SIGKILL)
            while served.complete()[0] != 200:
                time.sleep(0.02)
            seconds.append(round(time.perf_counter() - begun, 2))
        loads = [
            json.loads(line)["load_seconds"]
            for line in served.log.read_text().splitlines()
            if '"engine_ready"' in line
        ]
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "load_s": loads[1:],
        "pauses_s": "0.25 doubling: the back-off between restarts is in it",
    }


def disconnect(plan: Plan, num_clients: int = 200) -> dict[str, Any]:
    """All streams closed at once: until no page is held and nobody waits."""
    body = plan.body(0, max_tokens=3_000 if plan.is_tiny else 1_000)

    async def storm(served: Served) -> float:
        clients = [StreamClient(served.port, "/v1/completions", body) for _ in range(num_clients)]
        tasks = [asyncio.ensure_future(client.run()) for client in clients]
        while sum(client.seen.num_events > 0 for client in clients) < CONCURRENCY:
            await asyncio.sleep(0.02)
        begun = time.monotonic()
        for client, task in zip(clients, tasks, strict=True):
            client.hang_up()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return begun

    seconds = []
    with plan.served("--max-queued-requests", str(num_clients)) as served:
        watching = Watching(served)
        for _ in range(3):
            begun = asyncio.run(storm(served))
            while (now := watching.counts(begun))["pages_live"] or now["num_waiting"]:
                pass
            seconds.append(round(time.monotonic() - begun, 3))
        watching.close()
    return {"clients": num_clients, "seconds": seconds, "resolution_s": 0.1}


def inside(plan: Plan) -> dict[str, Any]:
    """Tokens a second with somebody watching the engine ten times a second, and without."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with plan.served() as served:
        asyncio.run(load(served, plan))
        for turn in range(6):
            is_watched = bool(turn % 2)
            tokens, seconds = asyncio.run(_watched_load(served, plan, is_watched))
            rates[is_watched].append(tokens / seconds)
    alone, watched = (statistics.median(rates[key]) for key in (False, True))
    return {
        "tokens_per_s": round(alone, 1),
        "watched_tokens_per_s": round(watched, 1),
        "ratio": round(watched / alone, 3),
    }


async def _watched_load(served: Served, plan: Plan, is_watched: bool) -> tuple[int, float]:
    if not is_watched:
        return await load(served, plan)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request_bytes("/inside?hz=10", method="GET"))

    async def swallow() -> None:
        while await reader.read(1 << 18):
            pass

    task = asyncio.ensure_future(swallow())
    try:
        return await load(served, plan)
    finally:
        task.cancel()
        writer.close()


# ------------------------------------------------------------ command line

MODES: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "throughput": throughput,
    "overhead": overhead,
    "idle": idle,
    "recovery": recovery,
    "disconnect": disconnect,
    "inside": inside,
}


def make_plan(args: argparse.Namespace, folder: Path) -> Plan:
    http = ("--http-server", args.http_server, "--max-num-seqs", str(CONCURRENCY))
    if args.model is None:
        model = write_tiny_folder(folder, max_position_embeddings=4_096)
        flags = ("--device", "cpu", "--load-format", "dummy", *http)
        load = (args.requests or 64, args.tokens or 200, args.streams)
        return Plan(model, flags, True, args.threads, *load)
    from quire.load.hub import resolve_model

    model = Path(resolve_model(args.model))
    load = (args.requests or 64, args.tokens or 48, args.streams)
    return Plan(model, http, False, args.threads, *load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--model", help="default: a random model of two layers")
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default: 1)")
    parser.add_argument("--requests", type=int, help="in one round of load")
    parser.add_argument("--tokens", type=int, help="generated for each")
    parser.add_argument("--streams", type=int, default=1_000, help="held open by idle")
    parser.add_argument("--http-server", choices=("granian", "uvicorn"), default="granian")
    args = parser.parse_args()
    if unknown := set(args.modes) - MODES.keys():
        parser.error(f"unknown mode {sorted(unknown)[0]!r}, want one of {', '.join(MODES)}")
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(args, Path(folder))
        about = {
            "model": args.model or "tiny random llama",
            "http_server": args.http_server,
            "concurrency": CONCURRENCY,
            "requests": plan.num_requests,
            "tokens_each": plan.num_tokens,
            "cores": os.cpu_count(),
            "note": "clients share the cores with the server",
        }
        for mode in args.modes or MODES:
            begun = time.perf_counter()
            found = MODES[mode](plan)
            took = round(time.perf_counter() - begun, 1)
            print(json.dumps({"what": f"server {mode}", **about, **found, "took_s": took}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()

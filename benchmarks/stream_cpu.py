"""CPU time that one streamed token costs an API process.

The API process is real; the engine at the other end of its socket is played here. It makes a token
for every stream, and the next only when all clients have read it, so each event is a write of its
own: the most a token can cost. With `--burst 4` the engine is four steps ahead of the readers.
Time is what the kernel counted for all threads. A busy machine makes it longer (cold caches), so
each figure is the least of several rounds.

    python -m benchmarks.stream_cpu --streams 1 16 64 256 --http-server granian
    python -m benchmarks.stream_cpu --path /v1/chat/completions --burst 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import string
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire.config import EngineArgs
from quire.engine import commands as msg
from quire.engine.wire import Codec, receive_async
from quire.load.open import open_tokenizer
from quire.server.child import Child
from quire.server.settings import Limits, ServeSettings
from quire.step import TokenEvent
from tests.e2e.harness import free_port
from tests.e2e.raw import request_bytes
from tests.tiny_folder import write_tiny_folder

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MAX_LEN = 1 << 20


class PlayedEngine:
    """Takes requests, and makes a step of them when told to."""

    def __init__(self, folder: Path, tokens: list[int]) -> None:
        self.address, self.ids = folder / "engine.sock", list[int]()
        self._tokens, self._num_steps = tokens, 0
        self._writer: asyncio.StreamWriter | None = None
        self._reports: Codec[msg.Report] = Codec(msg.Report)
        self._commands: Codec[msg.Command] = Codec(msg.Command)
        self.ended = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.address))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._say(msg.Hello(1, "0", "Played", MAX_LEN, 512, 64, 1 << 20, 8, [1], [], 0.0))
        beat = asyncio.ensure_future(self._keep_beating())
        while (body := await receive_async(reader)) is not None:
            command = self._commands.decode(body)
            if isinstance(command, msg.Submit):
                self.ids.append(command.id)
        beat.cancel()
        self.ended.set()

    async def _keep_beating(self) -> None:
        while True:
            self._say(msg.Beat({}, bool(self.ids), False, 0.0))
            await asyncio.sleep(1.0)

    def _say(self, report: msg.Report) -> None:
        assert self._writer is not None
        self._writer.write(self._reports.frame(report))

    def step(self, finish: str | None = None) -> None:
        token = self._tokens[self._num_steps % len(self._tokens)]
        about = []
        if finish is not None or self._num_steps == 0:
            about = [msg.About(id, 0, "", 0, 0.1, 0.2, 0.3) for id in self.ids]
        self._num_steps += 1
        self._say(msg.Events([TokenEvent(id, (token,), finish) for id in self.ids], about))
        if finish is not None:
            self.ids, self._num_steps = [], 0


class Clients:
    """All streams, and how many events came over them."""

    def __init__(self) -> None:
        self.num_events = self.num_reads = self._wanted = 0
        self._is_there = asyncio.Event()

    def saw(self, data: bytes) -> None:
        self.num_reads += 1
        self.num_events += data.count(b"data: {")
        if self.num_events >= self._wanted:
            self._is_there.set()

    async def until(self, num_events: int) -> None:
        self._wanted = num_events
        self._is_there.clear()
        if self.num_events < num_events:
            await asyncio.wait_for(self._is_there.wait(), 60)


class Reader(asyncio.Protocol):
    def __init__(self, clients: Clients, request: bytes) -> None:
        self._clients, self._request = clients, request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._clients.saw(data)


def cpu_seconds(pid: int) -> float:
    """Of all threads, those that ended left out."""
    tasks = Path(f"/proc/{pid}/task")
    spent = [int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()]
    return sum(spent) / 1e9


async def is_ready(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.write(request_bytes("/ready", method="GET"))
    status = await reader.readline()
    writer.close()
    return b" 200 " in status


@contextmanager
def api_process(args: argparse.Namespace, folder: Path) -> Iterator[tuple[int, int]]:
    """(pid, port) of a process that serves; its engine is somebody else's to play."""
    port = free_port()
    settings = ServeSettings(
        engine=EngineArgs(model=str(folder), max_model_len=MAX_LEN),
        port=port,
        http_server=args.http_server,
        runtime_folder=str(folder),
        limits=Limits(max_queued_requests=2_000, max_queued_tokens=1 << 40),
        log_format="json",
        log_level="error",
    )
    child = Child("api", "quire.server.api_main", settings=msgspec.json.encode(settings))
    child.start()
    assert child.process is not None
    try:
        yield child.process.pid, port
    finally:
        child.signal(signal.SIGKILL)
        child.process.wait()


async def open_streams(
    engine: PlayedEngine, port: int, num_streams: int, args: argparse.Namespace
) -> Clients:
    clients, loop = Clients(), asyncio.get_running_loop()
    asked: dict[str, Any] = {"prompt": "a"}
    if args.path == CHAT:
        asked = {"messages": [{"role": "user", "content": "a"}]}
    asked |= {"logprobs": True if args.path == CHAT else 0} if args.logprobs else {}
    sent = request_bytes(args.path, asked | {"max_tokens": 1 << 16, "stream": True})
    for _ in range(num_streams):
        await loop.create_connection(lambda: Reader(clients, sent), "127.0.0.1", port)
    while len(engine.ids) < num_streams:
        await asyncio.sleep(0.01)
    num_roles = num_streams if args.path == CHAT else 0  # a chat's first event
    for step in range(20):
        engine.step()
        await clients.until(num_roles + num_streams * (step + 1))
    return clients


async def measure(
    engine: PlayedEngine, api: tuple[int, int], num_streams: int, args: argparse.Namespace
) -> dict[str, Any]:
    pid, port = api
    clients = await open_streams(engine, port, num_streams, args)
    num_steps = max(args.tokens // num_streams // args.burst, 1) * args.burst
    num_tokens, costs = num_streams * num_steps, []
    num_reads = clients.num_reads
    for _ in range(args.rounds):
        spent, num_events = cpu_seconds(pid), clients.num_events
        for step in range(1, num_steps + 1):
            engine.step()
            if step % args.burst == 0:
                await clients.until(num_events + num_streams * step)
        costs.append((cpu_seconds(pid) - spent) / num_tokens * 1e6)
    reads = clients.num_reads - num_reads
    engine.step("length")
    await asyncio.sleep(0.3)
    return {
        "streams": num_streams,
        "path": args.path,
        "http_server": args.http_server,
        "events_per_read": round(num_tokens * args.rounds / reads, 2),
        "api_us_per_token": round(min(costs), 1),
        "rounds": [round(cost, 1) for cost in costs],
    }


async def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny_folder(Path(name), max_position_embeddings=MAX_LEN)
        tokenizer = open_tokenizer(EngineArgs(model=str(folder)))
        engine = PlayedEngine(
            folder, tokenizer.encode(string.ascii_letters, add_special_tokens=False)
        )
        await engine.start()
        with api_process(args, folder) as api:
            async with asyncio.timeout(60):
                while not await is_ready(api[1]):
                    await asyncio.sleep(0.05)
            for num_streams in args.streams:
                print(json.dumps(await measure(engine, api, num_streams, args)), flush=True)
        await engine.ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--path", choices=(CHAT, PLAIN), default=PLAIN)
    parser.add_argument("--tokens", type=int, default=10_000, help="of all streams in a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--burst", type=int, default=1, help="steps before readers are waited for")
    parser.add_argument("--http-server", choices=("granian", "uvicorn"), default="granian")
    parser.add_argument("--logprobs", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

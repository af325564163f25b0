"""One request to a server and what became of it. Raw sockets on the caller's event loop.

Every request has a connection of its own, as from as many users. Times are the loop's clock;
whoever measures latency takes them from `meant`, the time the request was meant to be sent, so a
client that falls behind does not hide a server that does.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.bench.serve.stream import BadAnswer, StreamReading
from quire.bench.serve.work import Ask
from quire.errors import BadRequest

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send and how to ask."""

    url: str  # up to the path, such as http://127.0.0.1:8000
    model: str = "default"
    api: str = "completions"  # or "chat"
    key: str = ""
    ignores_eos: bool = True  # answers have the length that was asked for
    timeout_s: float = 600.0

    @property
    def address(self) -> tuple[str, int, bool]:
        """(host, port, whether it is encrypted)"""
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            port, parts = 0, urlsplit("")
        if not port or not parts.hostname:
            raise BadRequest(f"got --url {self.url!r}, want one such as http://127.0.0.1:8000")
        return parts.hostname, port, parts.scheme == "https"

    def request_bytes(self, ask: Ask) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.num_output,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt
        host, port, _ = self.address
        data = json.dumps(body).encode()
        path = "/v1/chat/completions" if self.api == "chat" else "/v1/completions"
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Connection: close",
            f"Content-Length: {len(data)}",
        ]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it; times in seconds from the start of the run."""

    meant: float  # to be sent
    sent: float = 0.0
    ended: float = 0.0
    failure: str | None = None  # its kind: "http 429", "timeout" ...
    detail: str = ""  # what the server said
    token_times: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0


async def send(target: Target, ask: Ask, meant: float, begun: float) -> Outcome:
    """`begun` is the start of the run on the loop's clock. Never raises for what a server does."""
    loop = asyncio.get_running_loop()
    outcome, reading = Outcome(meant, sent=loop.time() - begun), StreamReading()
    try:
        async with asyncio.timeout(target.timeout_s):
            await _exchange(target, ask, reading)
    except TimeoutError:
        outcome.failure = "timeout"
    except BadAnswer as error:
        outcome.failure, outcome.detail = "bad answer", str(error)
    except OSError as error:
        kind = "connection lost" if reading.status else "connection refused"
        outcome.failure, outcome.detail = kind, str(error)
    outcome.ended = loop.time() - begun
    _settle(outcome, reading, begun)
    return outcome


async def _exchange(target: Target, ask: Ask, reading: StreamReading) -> None:
    loop = asyncio.get_running_loop()
    host, port, is_encrypted = target.address
    context = ssl.create_default_context() if is_encrypted else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(target.request_bytes(ask))
        await writer.drain()
        while not reading.is_complete:
            data = await reader.read(READ_BYTES)
            if not data:
                reading.closed()
                break
            reading.feed(data, loop.time())
    finally:
        writer.close()


def _settle(outcome: Outcome, reading: StreamReading, begun: float) -> None:
    """What the answer was worth; anything but a whole stream of text is a failure with a name."""
    outcome.token_times = [at - begun for at in reading.token_times]
    outcome.num_prompt = reading.num_prompt_tokens or 0
    outcome.num_output = reading.num_output_tokens or len(reading.token_times)
    if outcome.failure is not None:
        return
    if reading.status != 200:
        outcome.failure = f"http {reading.status}" if reading.status else "connection lost"
        outcome.detail = bytes(reading.body[:300]).decode("utf-8", "replace")
    elif reading.error is not None:
        outcome.failure, outcome.detail = "error in stream", reading.error
    elif not reading.is_complete or reading.finish is None:
        outcome.failure = "broke off"
    elif not reading.token_times:
        outcome.failure = "no text"

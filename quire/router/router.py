"""Router: one address in front of engines that prefill and engines that decode.

A request that generates goes to an engine that prefills, which computes its prompt and answers with
a ticket, then to one that decodes, whose answer is passed on byte by byte. Each time the engine
with the fewest open requests is taken. If there is no ticket, for whatever reason, the request
goes on without one and the prompt is computed where it is decoded. No torch, no state on disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from quire.errors import BadRequest
from quire.obs.log import log_event
from quire.router.messages import MAX_HEAD, BadMessage, Request, read_head, read_request, refusal
from quire.server.handover import MAX_TICKET, PREFILL, TICKET

CONNECT_S = 5.0
PREFILL_S = 600.0
CHUNK = 1 << 16
GENERATES = ("/v1/chat/completions", "/v1/completions")
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
UNWANTED = ("stream_options", "logprobs", "top_logprobs", "prompt_logprobs", "best_of", "echo")


@dataclass(slots=True, eq=False)
class Engine:
    """One `quire serve`."""

    host: str
    port: int
    num_open: int = 0

    @staticmethod
    def of(url: str) -> Engine:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or not parts.hostname or port is None or parts.path.strip("/"):
            raise BadRequest(f"got engine {url!r}, want an address such as http://10.0.0.1:8000")
        return Engine(parts.hostname, port)

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


class Router:
    def __init__(self, prefill: Sequence[Engine], decode: Sequence[Engine]) -> None:
        self.prefill, self.decode = list(prefill), list(decode)
        self.num_tickets = self.num_without = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, and one request of it."""
        try:
            request = await read_request(reader)
            await _while_there(reader, self._serve(request, writer))
        except BadMessage as error:
            writer.write(refusal(error.status, str(error)))
        except (EOFError, OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has left, or said too little for too long
        finally:
            with suppress(OSError):
                await writer.drain()
                writer.close()

    async def _serve(self, request: Request, writer: asyncio.StreamWriter) -> None:
        extra = {}
        if self.prefill and request.path in GENERATES and _is_one_prompt(request):
            ticket = await self._ticket(request)
            self.num_tickets += bool(ticket)
            self.num_without += not ticket
            extra = {TICKET: ticket} if ticket else {}
        last = ""
        for engine in sorted(self.decode, key=lambda one: one.num_open):
            try:
                async with _connected(engine) as (answer, upstream):
                    upstream.write(request.to(engine.name, extra))
                    await upstream.drain()
                    await _pass_on(answer, writer)
                    return
            except _Unreachable as error:
                last = str(error)
                log_event("engine_unreachable", severity=logging.WARNING, reason=last)
        raise BadMessage(502, f"no engine that decodes can be reached: {last}")

    async def _ticket(self, request: Request) -> str:
        """Have the prompt computed; empty: it could not be, or left nothing to take."""
        assert request.values is not None
        asked = {k: v for k, v in request.values.items() if k not in UNWANTED} | ONE_TOKEN
        if request.path == "/v1/completions":
            del asked["max_completion_tokens"]
        engine = min(self.prefill, key=lambda one: one.num_open)
        try:
            async with asyncio.timeout(PREFILL_S), _connected(engine) as (answer, upstream):
                body = json.dumps(asked).encode()
                upstream.write(request.to(engine.name, {PREFILL: "1"}, body))
                await upstream.drain()
                head = await read_head(answer)
                while await answer.read(CHUNK):  # to its end, or it looks as if we had left
                    pass
                return head.headers.get(TICKET, "")[:MAX_TICKET]
        except (_Unreachable, BadMessage, EOFError, OSError, TimeoutError) as error:
            log_event("prefill_failed", severity=logging.WARNING, reason=str(error))
            return ""


class _Unreachable(Exception):
    """Nothing was sent to this engine."""


@asynccontextmanager
async def _connected(
    engine: Engine,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to an engine, counted as open; however it ends, the engine learns of it."""
    engine.num_open += 1
    try:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    engine.host, engine.port, limit=MAX_HEAD
                )
        except (OSError, TimeoutError) as error:
            raise _Unreachable(f"{engine.name}: {error or 'no answer'}") from None
        try:
            yield reader, writer
        finally:
            writer.close()
    finally:
        engine.num_open -= 1


async def _pass_on(answer: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await answer.read(CHUNK):
        writer.write(data)
        await writer.drain()


async def _while_there(reader: asyncio.StreamReader, work: Coroutine[None, None, None]) -> None:
    """Do the work until it is done or the client hangs up, which ends it at once."""
    task, gone = asyncio.create_task(work), asyncio.create_task(reader.read(1))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _is_one_prompt(request: Request) -> bool:
    """Lists of prompts are answered side by side; a ticket is for one."""
    values = request.values
    if request.method != "POST" or values is None:
        return False
    prompt = values.get("prompt")
    return not isinstance(prompt, list) or all(isinstance(token, int) for token in prompt)

"""A server that answers by a script: known delays, known failures, one event loop, no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

Script = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(value: Any) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def piece(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def answer(writer: asyncio.StreamWriter, delays: Sequence[float]) -> None:
    """One piece of text after each delay."""
    writer.write(HEAD)
    for delay in delays:
        await asyncio.sleep(delay)
        writer.write(piece("word "))
    writer.write(piece("", "length") + usage(7, len(delays)) + DONE)


async def serving(script: Script, work: Callable[[str], Awaitable[Any]]) -> Any:
    """Run `work` with the address of a server that answers every request by the script."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await script(json.loads(await reader.readexactly(length)), writer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await work(f"http://127.0.0.1:{port}")
    finally:
        server.close()

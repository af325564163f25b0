"""WorkerLink: the near end of a grammar worker. Start it, ask it, kill it; nothing else.

Whoever asks decides how long to wait. A worker that was late or died is of no further use: its
pipes may hold half a frame. `kill` always reaps, so no zombie is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from quire.errors import NotSupported, QuireError
from quire.grammar.worker import HEADER, pack
from quire.params import StructuredOutputsParams

WORKER_COMMAND = (sys.executable, "-m", "quire.grammar.worker")
MAX_REPLY_BYTES = 1 << 16


class WorkerDied(QuireError):
    """The worker ended, or said something that is not a reply."""


class WorkerLink:
    def __init__(self, process: Process) -> None:
        self.process = process

    @staticmethod
    async def start(command: Sequence[str], setup: dict[str, object], seconds: float) -> WorkerLink:
        """Spawn and hand over the tokenizer. Raises NotSupported, WorkerDied or TimeoutError."""
        process = await asyncio.create_subprocess_exec(
            *command,
            str(os.getpid()),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,  # a library's messages may quote what a client sent
            start_new_session=True,  # Ctrl-C is for the parent to judge
        )
        link = WorkerLink(process)
        try:
            error = await link._exchange(setup, seconds)
        except BaseException:
            await link.kill()
            raise
        if error is not None:
            await link.kill()
            raise NotSupported(error)
        return link

    async def ask(self, params: StructuredOutputsParams, seconds: float) -> str | None:
        """Why the grammar is refused, or None. Raises TimeoutError or WorkerDied: then kill it."""
        return await self._exchange(asdict(params), seconds)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    async def _exchange(self, value: dict[str, object], seconds: float) -> str | None:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            async with asyncio.timeout(seconds):
                stdin.write(pack(value))
                await stdin.drain()
                (size,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
                if size > MAX_REPLY_BYTES:
                    raise WorkerDied(f"the grammar worker sent a reply of {size} bytes")
                error = json.loads(await stdout.readexactly(size))["error"]
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError) as cause:
            raise WorkerDied("the grammar worker died") from cause
        return None if error is None else str(error)

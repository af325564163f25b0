"""Siblings: what API processes of one server ask each other, over unix sockets in their folder.

Any of them may be asked for /metrics, or to end a request that another one serves. A question is a
short frame, the answer another; nothing is asked while tokens flow. Every second each writes down
what it counted, so that a sibling that does not answer, or the one that takes its place after a
crash, still counts it: a crash costs the counts of a second at most.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.engine.wire import Codec, receive_async
from quire.errors import EngineDead
from quire.obs.shared import MetricsState

if TYPE_CHECKING:
    from quire.server.server import Server

ANSWER_S = 2.0
SAVE_S = 1.0


class AskMetrics(msgspec.Struct, frozen=True, tag=True):
    """The answer: what the process counted."""


class AskAbort(msgspec.Struct, frozen=True, tag=True):
    """End the request of this id, or all; the answer: how many there were."""

    request_id: str | None


class Counted(msgspec.Struct, frozen=True, tag=True):
    metrics: MetricsState


class Aborted(msgspec.Struct, frozen=True, tag=True):
    number: int


Question = AskMetrics | AskAbort
Answer = Counted | Aborted


class Siblings:
    """Our own ear, and the others' addresses."""

    def __init__(self, server: Server, abort: Callable[[str | None], int]) -> None:
        """`abort` ends requests of this process: one by its id, or all."""
        settings = server.settings
        self._server, self._abort = server, abort
        self._folder, self._index = Path(settings.runtime_folder), settings.api_index
        self._others = [at for at in range(settings.api_processes) if at != self._index]
        self._questions: Codec[Question] = Codec(Question)
        self._answers: Codec[Answer] = Codec(Answer)

    # ------------------------------------------------------------ asking

    async def metrics(self) -> list[MetricsState]:
        """What the others counted."""
        found = await asyncio.gather(*(self._ask(at, AskMetrics()) for at in self._others))
        states = [
            answer.metrics if isinstance(answer, Counted) else self._saved(at)
            for at, answer in zip(self._others, found, strict=True)
        ]
        return [state for state in states if state is not None]

    async def abort(self, request_id: str | None) -> int:
        found = await asyncio.gather(*(self._ask(at, AskAbort(request_id)) for at in self._others))
        return sum(answer.number for answer in found if isinstance(answer, Aborted))

    async def _ask(self, index: int, question: Question) -> Answer | None:
        """None when it is not there."""
        with suppress(OSError, TimeoutError, EngineDead):
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._address(index))
                try:
                    writer.write(self._questions.frame(question))
                    body = await receive_async(reader)
                    return None if body is None else self._answers.decode(body)
                finally:
                    writer.close()
        return None

    # ------------------------------------------------------------ answering

    async def run(self) -> None:
        """As long as the process: answer, and write down what was counted."""
        Path(self._address(self._index)).unlink(missing_ok=True)  # of whoever was here before
        ear = await asyncio.start_unix_server(self._answer, self._address(self._index))
        async with ear:
            while True:
                await asyncio.sleep(SAVE_S)
                self.save()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (body := await receive_async(reader)) is not None:
                question = self._questions.decode(body)
                answer: Answer
                if isinstance(question, AskAbort):
                    answer = Aborted(self._abort(question.request_id))
                else:
                    answer = Counted(self._server.metrics.state())
                writer.write(self._answers.frame(answer))
        except EngineDead:
            pass  # what is no question gets no answer
        finally:
            writer.close()

    # ------------------------------------------------------------ across a crash

    def save(self) -> None:
        path = self._state_file(self._index)
        part = path.with_suffix(".part")
        with suppress(OSError):  # a full disk costs no more than what a crash would forget
            part.write_bytes(msgspec.msgpack.encode(self._server.metrics.state()))
            os.replace(part, path)

    def restore(self) -> None:
        """Go on from what our forerunner counted."""
        if (state := self._saved(self._index)) is not None:
            self._server.metrics.restore(state)

    def _saved(self, index: int) -> MetricsState | None:
        try:
            return msgspec.msgpack.decode(self._state_file(index).read_bytes(), type=MetricsState)
        except (OSError, msgspec.MsgspecError):
            return None

    def _state_file(self, index: int) -> Path:
        return self._folder / f"api-{index}.counts"

    def _address(self, index: int) -> str:
        return str(self._folder / f"api-{index}.sock")

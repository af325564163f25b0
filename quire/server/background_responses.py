"""BackgroundResponses: makes the responses that clients asked for and did not wait for.

They are rows of the store until they are done, so they survive the death of any process: whoever
holds the shelf's lock makes them, once more from the start if need be. Otherwise they are requests
like all others, with the same places, deadlines and priority.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from quire.errors import QuireError
from quire.kept.records import Record
from quire.obs.log import log_event
from quire.server import sse
from quire.server.batch_runner import AGAIN, MAX_FAULTS, OWN_S, POLL_S, SWEEP_S, TROUBLE_S
from quire.server.cascade import Escalated
from quire.server.http import HttpRequest
from quire.server.keys import Caller
from quire.server.problems import Problem, problem_of
from quire.server.responses_output import RATE_LIMIT, SERVER_ERROR
from quire.server.server import Server
from quire.server.shelf import Shelf

Make = Callable[[HttpRequest, Server, Record], Awaitable[None]]


class BackgroundResponses:
    def __init__(self, server: Server, shelf: Shelf, make: Make) -> None:
        """`make` answers a stored request and writes its response down."""
        self.server, self.shelf, self.make = server, shelf, make
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_faults: Counter[str] = Counter()
        self._next_sweep = 0.0

    async def run(self) -> None:
        """As long as the process."""
        while not self.shelf.try_own():
            await asyncio.sleep(OWN_S)
        try:
            while True:
                self.shelf.wake_responses.clear()
                await self._turn_or_wait()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.shelf.wake_responses.wait(), POLL_S)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn_or_wait(self) -> None:
        try:
            await self._turn()
        except (sqlite3.Error, OSError) as error:  # a full disk, a database somebody holds
            log_event("responses_stand_still", severity=logging.ERROR, reason=str(error))
            await asyncio.sleep(TROUBLE_S)

    async def _turn(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            await self.shelf.records.sweep()
            if self.server.answers is not None:
                await self.server.answers.entries.sweep()
        if self.server.is_draining or self.server.is_down:
            return
        for record in await self.shelf.records.open_records():
            if len(self._tasks) >= self.server.background_places:
                return
            if record.id not in self._tasks:
                self._start(record)

    def _start(self, record: Record) -> None:
        task = asyncio.create_task(self._answer(record), name=record.id)
        self._tasks[record.id] = task
        task.add_done_callback(partial(self._done, record))

    def _done(self, record: Record, task: asyncio.Task[None]) -> None:
        del self._tasks[record.id]
        if task.cancelled():
            return
        self.shelf.wake_responses.set()
        if (error := task.exception()) is not None:  # a bug: it would come again
            log_event("bug", severity=logging.ERROR, id=record.id, reason=repr(error))
            problem = Problem(500, "internal error; the log has it")
            failing = asyncio.create_task(self._fail(record, problem))
            self._tasks[record.id] = failing
            failing.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    async def _answer(self, record: Record) -> None:
        body = json.loads(record.body) | {"status": "in_progress"}
        if not await self.shelf.records.move(record, "in_progress", sse.encode(body)):
            return  # cancelled before it began
        request = HttpRequest(
            method="POST",
            path="/v1/responses",
            query={},
            headers={},
            id=record.id,
            body=record.request or b"",
            has_body=True,
            caller=Caller(record.tenant, is_admin=False),
        )
        models = self.server.models
        try:
            server = self.server if models is None else await models.serving(request)
            try:
                await self.make(request, server, record)
            except Escalated as why:
                assert models is not None
                await self.make(request, await models.escalated(request, why), record)
        except (QuireError, Problem) as error:
            problem = problem_of(error) or Problem(500, "internal error")
            if not await self._tries_again(record, problem):
                await self._fail(record, problem)

    async def _tries_again(self, record: Record, problem: Problem) -> bool:
        """Whether it stays open: it says nothing about this response that there was no room."""
        if problem.code not in AGAIN:
            return False
        if problem.code == "engine_unavailable":
            self._num_faults[record.id] += 1
            if self._num_faults[record.id] >= MAX_FAULTS:
                del self._num_faults[record.id]
                return False
        await asyncio.sleep(POLL_S)
        return True

    async def _fail(self, record: Record, problem: Problem) -> None:
        code = RATE_LIMIT if problem.status == 429 else SERVER_ERROR
        error = {"code": code, "message": problem.message}
        body = json.loads(record.body) | {"status": "failed", "error": error}
        await self.shelf.records.move(record, "failed", sse.encode(body))

"""BatchRunner: lines of batches through the server's own handlers, behind all other requests.

A line is an ordinary request of the lowest priority: the engine gives it what others leave. Its
answer is written once, in one transaction with the batch's counts, so a batch goes on wherever it
was when something died: nothing is lost, nothing is answered twice. Lines of several batches take
turns. A line under which the engine died runs alone the next time, and fails after some such times.
A batch that found no room pauses, and holds no place meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from quire.batches.lines import LineError, check_lines, read_body
from quire.batches.output import write_outputs
from quire.batches.store import NEVER_RAN, Answer, Batch, OpenLine
from quire.obs.log import log_event
from quire.request import BACKGROUND
from quire.server import sse
from quire.server.cascade import Escalated
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.keys import Caller
from quire.server.problems import Problem, problem_of
from quire.server.server import Server
from quire.server.shelf import Shelf
from quire.server.turnstile import Turnstile

Handler = Callable[[HttpRequest, Server], Awaitable[Reply | EventStream]]

POLL_S = 0.5
ALONE_S = 2.0  # before all others make way once more for a line that found no room
OWN_S = 2.0  # between two looks whether the process that works on batches is gone
SWEEP_S = 600.0
TROUBLE_S = 5.0
PAGE = 256  # lines read from the database at once
MAX_FAULTS = 5
# Answers that say nothing about the line.
AGAIN = ("engine_unavailable", "queue_full", "queue_timeout", "draining", "busy", "model_loading")
EXPIRED = sse.encode({"code": "batch_expired", "message": "the batch's window ended before it ran"})


@dataclass(slots=True)
class Feed:
    """Lines of one batch that are to run."""

    batch: Batch
    lines: deque[OpenLine] = field(default_factory=deque)
    last_read: int = -1
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    not_before: float = 0.0  # by the loop's clock: it found no room
    escalated: dict[int, str] = field(default_factory=dict)  # lines the small model cannot do: why


class BatchRunner:
    def __init__(self, server: Server, shelf: Shelf, handlers: Mapping[str, Handler]) -> None:
        """`handlers`: by endpoint."""
        self.server, self.shelf, self.handlers = server, shelf, handlers
        self._feeds: dict[str, Feed] = {}
        self._answers: list[Answer] = []
        self._has_answers = asyncio.Event()
        self._turnstile = Turnstile(per_turn=1)
        self._is_solo = False  # a line that must run alone is under way
        self._next_sweep = 0.0

    async def run(self) -> None:
        """As long as the process."""
        while not self.shelf.try_own():
            await asyncio.sleep(OWN_S)
        writer = asyncio.create_task(self._write_answers())
        try:
            while True:
                await self._turn_or_wait()
                self.shelf.wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.shelf.wake.wait(), POLL_S)
        finally:
            writer.cancel()
            for feed in self._feeds.values():
                await _stop(feed)

    # ------------------------------------------------------------ batches

    async def _turn_or_wait(self) -> None:
        """A full disk, or a database somebody holds: batches stand still and go on later."""
        try:
            await self._turn()
        except (sqlite3.Error, OSError) as error:
            await self._stand_still(error)

    async def _stand_still(self, error: Exception) -> None:
        log_event("batches_stand_still", severity=logging.ERROR, reason=str(error))
        await asyncio.sleep(TROUBLE_S)

    async def _turn(self) -> None:
        now, batches = asyncio.get_running_loop().time(), self.shelf.batches
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            await self.shelf.files.sweep(await batches.inputs_in_use())
        trouble: Exception | None = None
        for batch in await batches.open_batches():
            try:
                await self._advance(batch)
            except (sqlite3.Error, OSError) as error:  # of this one: the others go on
                trouble = error
        await self._fill()
        if trouble is not None:
            raise trouble

    async def _advance(self, batch: Batch) -> None:
        store = self.shelf.batches
        if batch.status == "validating":
            await self._validate(batch)
        elif batch.status == "cancelling":
            await self._end_lines(batch.id)
            await self._finish(batch, "cancelled")
        elif batch.status == "finalizing":
            await self._finish_all(batch)
        elif batch.completed + batch.failed == batch.total:
            self._feeds.pop(batch.id, None)
            if await store.move(batch.id, ("in_progress",), "finalizing"):
                await self._finish_all(batch)
        elif batch.is_past_window:
            await self._expire(batch)
        else:
            feed = self._feeds.setdefault(batch.id, Feed(batch))
            feed.batch = batch

    async def _validate(self, batch: Batch) -> None:
        path = self.shelf.files.path(batch.input_file_id)
        try:
            checked = await asyncio.to_thread(check_lines, path, batch.endpoint)
        except OSError as error:
            await self.shelf.batches.fail(batch.id, [_gone(batch, error)])
            return
        if checked.errors:
            await self.shelf.batches.fail(batch.id, checked.errors)
            return
        begun = await self.shelf.batches.begin(batch.id, checked.places)
        if begun is not None:
            self._feeds[batch.id] = Feed(begun)

    async def _expire(self, batch: Batch) -> None:
        await self._end_lines(batch.id)
        store, after = self.shelf.batches, -1
        while lines := await store.open_lines(batch.id, after, PAGE):
            after = lines[-1].number
            await store.answer([Answer(batch.id, x.number, NEVER_RAN, EXPIRED) for x in lines])
        if await store.move(batch.id, ("in_progress",), "finalizing"):
            await self._finish_all(batch)

    async def _finish_all(self, batch: Batch) -> None:
        """Every line came to something; expired is a batch of which some never ran."""
        has_unrun = await self.shelf.batches.has_unrun(batch.id)
        await self._finish(batch, "expired" if has_unrun else "completed")

    async def _end_lines(self, batch_id: str) -> None:
        """Stop what runs; what was answered stays so."""
        feed = self._feeds.pop(batch_id, None)
        if feed is not None:
            await _stop(feed)
        await self._flush()

    async def _finish(self, batch: Batch, status: str) -> None:
        store = self.shelf.batches
        made = await write_outputs(batch, store, self.shelf.files)
        before = ("finalizing", "cancelling")
        done = await store.move(
            batch.id, before, status, output_file_id=made.output, error_file_id=made.errors
        )
        if done is not None:
            log_event(
                "batch_done",
                batch=batch.id,
                status=status,
                completed=done.completed,
                failed=done.failed,
            )

    # ------------------------------------------------------------ lines

    @property
    def _num_running(self) -> int:
        return sum(len(feed.tasks) for feed in self._feeds.values())

    async def _fill(self) -> None:
        """Start lines, of the batch with the fewest under way, until the engine has enough."""
        server, most = self.server, self.server.background_places
        feeds = list(self._feeds.values())
        while True:
            is_waiting = server.is_draining or server.is_down or self._is_solo
            # Answers that cannot be written pile up in memory: no more lines until they are.
            if is_waiting or len(self._answers) > 2 * most or self._num_running >= most:
                return
            for each in feeds:
                await self._read_on(each)
            now = asyncio.get_running_loop().time()
            ready = [each for each in feeds if each.lines and each.not_before <= now]
            suspect = next((each for each in ready if each.lines[0].num_faults), None)
            if suspect is not None:  # it must be alone, and so nobody else may start
                if self._num_running == 0:
                    self._start(suspect, suspect.lines.popleft())
                return
            if not ready:
                return
            feed = min(ready, key=lambda each: len(each.tasks))
            self._start(feed, feed.lines.popleft())

    async def _read_on(self, feed: Feed) -> None:
        if feed.lines:
            return
        found = await self.shelf.batches.open_lines(feed.batch.id, feed.last_read, PAGE)
        if found:
            feed.last_read = found[-1].number
            feed.lines.extend(found)

    def _start(self, feed: Feed, line: OpenLine) -> None:
        self._is_solo = line.num_faults > 0
        task = asyncio.create_task(self._run_line(feed, line))
        feed.tasks[line.number] = task

        def done(ended: asyncio.Task[None]) -> None:
            if feed.tasks.get(line.number) is ended:
                del feed.tasks[line.number]
            if line.num_faults:
                self._is_solo = False
            if not ended.cancelled() and (error := ended.exception()) is not None:
                log_event("batch_line_broke", severity=logging.ERROR, reason=repr(error))
                feed.lines.append(line)
            self.shelf.wake.set()

        task.add_done_callback(done)

    async def _run_line(self, feed: Feed, line: OpenLine) -> None:
        batch, number, write = feed.batch, line.number, None
        try:
            request, reply = await self._answer(feed, line)
            status, body, write = reply.status, reply.body, request.with_answer
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                trace = traceback.format_exc()
                log_event("bug", severity=logging.ERROR, batch=batch.id, traceback=trace)
                problem = Problem(500, "internal error; the log has it")
            if problem.code in AGAIN and await self._tries_again(feed, line, problem):
                return
            status, body = problem.status, problem.body()
        feed.escalated.pop(number, None)
        self._answers.append(Answer(batch.id, number, status, body, write))
        self._has_answers.set()

    async def _answer(self, feed: Feed, line: OpenLine) -> tuple[HttpRequest, Reply]:
        batch = feed.batch
        path = self.shelf.files.path(batch.input_file_id)
        body = await asyncio.to_thread(read_body, path, line.begin, line.size)
        body["priority"] = BACKGROUND
        request = HttpRequest(
            method="POST",
            path=batch.endpoint,
            query={},
            headers={},
            id=f"{batch.id}-{line.number}",
            body=sse.encode(body),
            has_body=True,
            caller=Caller(batch.tenant, is_admin=False),
            is_background=True,
        )
        handler = self.handlers[batch.endpoint]
        if line.number not in feed.escalated:
            models = self.server.models
            server = self.server if models is None else await models.serving(request)
            await self._turnstile.enter()  # lines that begin together leave room for visitors
            try:
                return request, _whole(await handler(request, server))
            except Escalated as why:
                feed.escalated[line.number] = str(why)
        return request, await self._answer_by_large(request, feed.escalated[line.number])

    async def _answer_by_large(self, request: HttpRequest, why: str) -> Reply:
        """Until it has room, the line comes back here: the small model has had its try."""
        models = self.server.models
        assert models is not None
        server = await models.escalated(request, Escalated(why))
        await self._turnstile.enter()
        return _whole(await self.handlers[request.path](request, server))

    async def _tries_again(self, feed: Feed, line: OpenLine, problem: Problem) -> bool:
        """Back into the line, unless the engine has died under it too often."""
        if problem.code == "engine_unavailable":
            faults = await self.shelf.batches.fault(feed.batch.id, line.number)
            if faults >= MAX_FAULTS:
                return False
            line = line._replace(num_faults=faults)
        else:
            pause = ALONE_S if line.num_faults else POLL_S
            feed.not_before = asyncio.get_running_loop().time() + pause
        feed.lines.append(line)
        return True

    # ------------------------------------------------------------ answers

    async def _write_answers(self) -> None:
        """All that came while the last were written go to the disk together."""
        while True:
            await self._has_answers.wait()
            self._has_answers.clear()
            await self._flush()
            self.shelf.wake.set()

    async def _flush(self) -> None:
        answers, self._answers = self._answers, []
        if not answers:
            return
        try:
            await self.shelf.batches.answer(answers)
        except (sqlite3.Error, OSError) as error:
            self._answers = answers + self._answers
            await self._stand_still(error)
            self._has_answers.set()


def _whole(reply: Reply | EventStream) -> Reply:
    assert isinstance(reply, Reply), "lines that stream were refused"
    return reply


async def _stop(feed: Feed) -> None:
    tasks = list(feed.tasks.values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _gone(batch: Batch, error: OSError) -> LineError:
    text = f"the input file {batch.input_file_id} cannot be read: {error.strerror}"
    return LineError("file_not_found", None, text, "input_file_id")

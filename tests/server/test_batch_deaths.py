"""Batches whose process dies between any two writes, and batches whose window ends."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quire.batches.database import Database
from quire.batches.files import NewFile
from quire.batches.store import Batch, Wish
from quire.kept.records import CONVERSATION, RESPONSE, NewRecord
from quire.server import batch_runner
from quire.server.batch_runner import BatchRunner
from quire.server.routes import batch_handlers
from quire.server.shelf import Shelf
from tests.server.fakes import Bench

T = TypeVar("T")
ME, URL = "me", "/v1/responses"


class Died(BaseException):
    """Nothing of this process writes any more."""


class Mortal:
    """Counts what a database is asked, and dies of one of them."""

    def __init__(self, database: Database, deadly: int, is_written: bool) -> None:
        self.database, self.deadly, self.is_written = database, deadly, is_written
        self.num_calls = 0
        self.died = asyncio.Event()
        self._call = database.call
        database.call = self.call  # type: ignore[method-assign]

    async def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        self.num_calls += 1
        if self.num_calls == self.deadly and self.is_written:
            await self._call(work)
        if self.num_calls >= self.deadly:
            self.died.set()
            raise Died
        return await self._call(work)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "POLL_S", 0.002)
    monkeypatch.setattr(batch_runner, "OWN_S", 0.002)


def asked(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", **fields}


async def submit(shelf: Shelf, *bodies: dict[str, Any], url: str = URL) -> Batch:
    lines = [
        {"custom_id": str(at), "method": "POST", "url": url, "body": body}
        for at, body in enumerate(bodies)
    ]
    (spool := shelf.files.new_spool()).write_text("\n".join(map(json.dumps, lines)))
    file = await shelf.files.keep(spool, NewFile(ME, "batch", "lines.jsonl", None))
    return await shelf.batches.add(Wish(ME, url, file.id, "24h", 60, None))


async def run(shelf: Shelf, until: Callable[[], Awaitable[bool]]) -> None:
    bench = Bench()
    bench.server.shelf = shelf
    task = asyncio.create_task(BatchRunner(bench.server, shelf, batch_handlers()).run())
    try:
        async with asyncio.timeout(20):
            while not await until():
                await asyncio.sleep(0.002)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run_to_the_end(shelf: Shelf, batch: Batch) -> Batch:
    async def is_done() -> bool:
        return not await shelf.batches.open_batches()

    await run(shelf, is_done)
    found = await shelf.batches.get(ME, batch.id)
    assert found is not None
    return found


async def lines_of(shelf: Shelf, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    text = shelf.files.path(file_id).read_text()
    return [json.loads(line) for line in text.splitlines()]


async def past_window(shelf: Shelf) -> None:
    await shelf.database.call(lambda db: db.execute("UPDATE batches SET expires_at = 1"))


async def left_lines(shelf: Shelf) -> int:
    query = "SELECT count(*) FROM lines"
    return int(await shelf.database.call(lambda db: db.execute(query).fetchone()[0]))


async def _remembered(folder: Path, deadly: int, is_written: bool) -> bool:
    """Dies at one write, goes on in another process; False: it was done before that write."""
    shelf = Shelf(folder)
    talk = NewRecord(ME, "conv_1", CONVERSATION, b"[]", b"{}")
    await shelf.records.put(talk)
    batch = await submit(
        *(shelf, asked(conversation="conv_1", store=True), asked(conversation="conv_1")),
        *(asked(store=True), asked()),
    )
    mortal = Mortal(shelf.database, deadly, is_written)
    ended = asyncio.Event()

    async def is_over() -> bool:
        if mortal.died.is_set():
            return True
        query = "SELECT count(*) FROM batches WHERE status = 'completed'"
        if await mortal._call(lambda db: db.execute(query).fetchone()[0]):
            ended.set()
        return ended.is_set()

    await run(shelf, is_over)
    shelf.close()
    after = Shelf(folder)
    done = await run_to_the_end(after, batch)
    assert (done.status, done.completed, done.failed) == ("completed", 4, 0)
    found = await lines_of(after, done.output_file_id)
    assert [line["custom_id"] for line in found] == ["0", "1", "2", "3"]
    items = await after.conversations.items(ME, "conv_1")
    assert [item["role"] for item in items] == ["user", "assistant"] * 2
    told = {line["response"]["body"]["id"]: line["response"]["body"] for line in found}
    said = [item["id"] for body in told.values() for item in body["output"]]
    assert {item["id"] for item in items if item["role"] == "assistant"} == set(said[:2])
    query = "SELECT id FROM kept WHERE kind = ?"
    kept = await after.database.call(lambda db: db.execute(query, (RESPONSE,)).fetchall())
    assert {row["id"] for row in kept} == {one for at, one in enumerate(told) if at in (0, 2)}
    assert await left_lines(after) == 0
    after.close()
    return not ended.is_set()


@pytest.mark.parametrize("is_written", [False, True])
def test_a_death_at_any_write_changes_nothing(tmp_path: Path, is_written: bool) -> None:
    """Red when a batch whose process dies while its file is checked, while lines run or while its
    output is written loses a line, or a conversation gets a line's words twice."""
    deadly = 1
    while asyncio.run(_remembered(tmp_path / str(deadly), deadly, is_written)):
        deadly += 1
    assert deadly > 12  # it did die, of many different writes


def test_lines_that_never_ran_are_told(tmp_path: Path) -> None:
    """Red when an expired batch hides what ran, or which lines did not."""

    async def work() -> None:
        shelf = Shelf(tmp_path)
        batch = await submit(shelf, *[asked()] * 5)
        checked = batch_runner.check_lines(shelf.files.path(batch.input_file_id), URL)
        await shelf.batches.begin(batch.id, checked.places)
        answer = batch_runner.Answer(batch.id, 3, 200, b'{"a": 1}')
        await shelf.batches.answer([answer])
        await past_window(shelf)
        done = await run_to_the_end(shelf, batch)
        assert (done.status, done.completed, done.failed) == ("expired", 1, 4)
        assert done.expired_at is not None and done.completed_at is None
        (good,) = await lines_of(shelf, done.output_file_id)
        assert good["custom_id"] == "3" and good["response"]["body"] == {"a": 1}
        bad = await lines_of(shelf, done.error_file_id)
        assert [line["custom_id"] for line in bad] == ["0", "1", "2", "4"]
        assert {line["error"]["code"] for line in bad} == {"batch_expired"}
        assert {line["response"] for line in bad} == {None}
        shelf.close()

    asyncio.run(work())


@pytest.mark.parametrize("ran", [True, False])
def test_a_death_while_files_are_written_does_not_change_the_end(tmp_path: Path, ran: bool) -> None:
    """Red when the clock, and not what lines came to, says how a batch ended."""

    async def work() -> None:
        shelf = Shelf(tmp_path)
        batch = await submit(shelf, asked())
        checked = batch_runner.check_lines(shelf.files.path(batch.input_file_id), URL)
        await shelf.batches.begin(batch.id, checked.places)
        answer = batch_runner.Answer(batch.id, 0, 200, b"{}")
        never = answer._replace(status=batch_runner.NEVER_RAN, body=batch_runner.EXPIRED)
        await shelf.batches.answer([answer if ran else never])
        if ran:
            await shelf.batches.move(batch.id, ("in_progress",), "finalizing")
            await past_window(shelf)
        done = await run_to_the_end(shelf, batch)
        assert done.status == ("completed" if ran else "expired")
        shelf.close()

    asyncio.run(work())


def test_what_cannot_be_remembered_is_answered(tmp_path: Path) -> None:
    """Red when a conversation that is full stops a batch, or a line says that it was stored."""

    async def work() -> None:
        shelf = Shelf(tmp_path)
        talk = NewRecord(ME, "conv_1", CONVERSATION, b"[]", b"{}")
        await shelf.records.put(talk)
        shelf.records.bounds = shelf.records.bounds._replace(max_bytes=50)
        batch = await submit(shelf, asked(conversation="conv_1", store=True), asked())
        done = await run_to_the_end(shelf, batch)
        assert (done.status, done.completed) == ("completed", 2)
        first, _ = await lines_of(shelf, done.output_file_id)
        assert first["response"]["body"]["store"] is False
        assert await shelf.conversations.items(ME, "conv_1") == []
        shelf.close()

    asyncio.run(work())


def test_a_line_does_not_go_to_the_background(tmp_path: Path) -> None:
    async def work() -> None:
        shelf = Shelf(tmp_path)
        done = await run_to_the_end(shelf, await submit(shelf, asked(background=True)))
        (bad,) = await lines_of(shelf, done.error_file_id)
        assert bad["response"]["body"]["error"]["param"] == "background"
        shelf.close()

    asyncio.run(work())

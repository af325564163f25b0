"""BatchStore: batches and their lines in the database; every change of state is one transaction.

A line is answered once: its answer is written only where there is none, together with the batch's
counts. So whatever dies, and whenever, a batch goes on where the database says it is.

    validating -> in_progress -> finalizing -> completed
        |             |-> cancelling -> cancelled
        v             `-> (past its window) expired
      failed
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quire.batches.database import Database
from quire.batches.files import Page, QuotaExceeded, rows_after
from quire.batches.lines import LineError, Place

NEVER_RAN = 0  # a line's status
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
STAMPS = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)


class Batch(NamedTuple):
    """One row; the columns' meanings are OpenAI's."""

    id: str
    tenant: str
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    output_file_id: str | None
    error_file_id: str | None
    errors: str | None
    total: int
    completed: int
    failed: int
    output_expires_in: int | None  # seconds that output files are kept

    @property
    def is_past_window(self) -> bool:
        return time.time() >= self.expires_at

    def shape(self) -> dict[str, Any]:
        """OpenAI's Batch object."""
        errors = json.loads(self.errors) if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None if errors is None else {"object": "list", "data": errors},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **{name: getattr(self, name) for name in STAMPS},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "metadata": json.loads(self.metadata) if self.metadata else None,
        }


class Wish(NamedTuple):
    """What a client asks for."""

    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None
    output_expires_in: int | None = None
    most_open: int | None = None  # batches of the tenant that are not done


class OpenLine(NamedTuple):
    number: int
    custom_id: str
    begin: int
    size: int
    num_faults: int


class Result(NamedTuple):
    number: int
    custom_id: str
    status: int
    answer: bytes


class Answer(NamedTuple):
    """What a line came to. NEVER_RAN: `body` says why."""

    batch_id: str
    number: int
    status: int
    body: bytes
    # What else is written with it, once; returns the body, which may tell of it.
    write: Callable[[sqlite3.Connection], bytes] | None = None


class BatchStore:
    def __init__(self, database: Database) -> None:
        self.database = database

    # ------------------------------------------------------------ batches

    async def add(self, wish: Wish) -> Batch:
        now = int(time.time())
        metadata = None if wish.metadata is None else json.dumps(wish.metadata)
        columns = {
            "id": f"batch_{secrets.token_hex(12)}",
            "tenant": wish.tenant,
            "status": "validating",
            "endpoint": wish.endpoint,
            "input_file_id": wish.input_file_id,
            "completion_window": wish.completion_window,
            "metadata": metadata,
            "created_at": now,
            "expires_at": now + wish.window_s,
            "output_expires_in": wish.output_expires_in,
        }

        def insert(db: sqlite3.Connection) -> Batch:
            _check_quota(db, wish)
            marks = ", ".join("?" * len(columns))
            db.execute(
                f"INSERT INTO batches ({', '.join(columns)}) VALUES ({marks})",
                tuple(columns.values()),
            )
            return _get(db, str(columns["id"]))

        return await self.database.call(insert)

    async def get(self, tenant: str, batch_id: str) -> Batch | None:
        query = "SELECT * FROM batches WHERE id = ? AND tenant = ?"
        found = await self.database.call(
            lambda db: db.execute(query, (batch_id, tenant)).fetchone()
        )
        return None if found is None else Batch(*found)

    async def page(self, tenant: str, page: Page) -> list[Batch]:
        """One more than the page has, if there are more."""
        rows = await self.database.call(lambda db: rows_after(db, "batches", tenant, page, {}))
        return [Batch(*row) for row in rows]

    async def open_batches(self) -> list[Batch]:
        """Everyone's, oldest first."""
        marks = ", ".join("?" * len(OPEN))
        query = f"SELECT * FROM batches WHERE status IN ({marks}) ORDER BY created_at, rowid"
        rows = await self.database.call(lambda db: db.execute(query, OPEN).fetchall())
        return [Batch(*row) for row in rows]

    async def inputs_in_use(self) -> set[str]:
        """Files that open batches read from."""
        return {batch.input_file_id for batch in await self.open_batches()}

    async def move(
        self, batch_id: str, before: Sequence[str], status: str, **columns: str | int | None
    ) -> Batch | None:
        """Change the state if it is one of `before`, and stamp the time; None: it was not.

        With the last state go the lines: what they came to is in the output files."""
        values = {"status": status, **columns}
        if f"{status}_at" in STAMPS:
            values[f"{status}_at"] = int(time.time())

        def change(db: sqlite3.Connection) -> Batch | None:
            sets = ", ".join(f"{name} = ?" for name in values)
            marks = ", ".join("?" * len(before))
            done = db.execute(
                f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({marks})",
                (*values.values(), batch_id, *before),
            )
            if not done.rowcount:
                return None
            if status not in OPEN:
                db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            return _get(db, batch_id)

        return await self.database.call(change)

    # ------------------------------------------------------------ lines

    async def begin(self, batch_id: str, places: Sequence[Place]) -> Batch | None:
        """The file was found good: its lines are known and the batch is in progress."""

        def fill(db: sqlite3.Connection) -> Batch | None:
            if _get(db, batch_id).status != "validating":
                return None  # cancelled meanwhile
            db.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, begin, size)"
                " VALUES (?, ?, ?, ?, ?)",
                [(batch_id, *place) for place in places],
            )
            db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ?"
                " WHERE id = ?",
                (int(time.time()), len(places), batch_id),
            )
            return _get(db, batch_id)

        return await self.database.call(fill)

    async def fail(self, batch_id: str, errors: Sequence[LineError]) -> Batch | None:
        text = json.dumps([error.shape() for error in errors])
        return await self.move(batch_id, ("validating",), "failed", errors=text)

    async def open_lines(self, batch_id: str, after: int, count: int) -> list[OpenLine]:
        query = (
            "SELECT number, custom_id, begin, size, num_faults FROM lines"
            " WHERE batch_id = ? AND is_answered = 0 AND number > ? ORDER BY number LIMIT ?"
        )
        rows = await self.database.call(
            lambda db: db.execute(query, (batch_id, after, count)).fetchall()
        )
        return [OpenLine(*row) for row in rows]

    async def answer(self, answers: Sequence[Answer]) -> None:
        """Keep what lines came to. A line that has an answer keeps the one it has."""

        def write(db: sqlite3.Connection) -> None:
            for answer in answers:
                _answer_line(db, answer)

        await self.database.call(write)

    async def fault(self, batch_id: str, number: int) -> int:
        """The engine died under this line, or with it; returns how often that has happened."""

        def count(db: sqlite3.Connection) -> int:
            key = (batch_id, number)
            where = "WHERE batch_id = ? AND number = ?"
            db.execute(f"UPDATE lines SET num_faults = num_faults + 1 {where}", key)
            row = db.execute(f"SELECT num_faults FROM lines {where}", key).fetchone()
            return int(row[0])

        return await self.database.call(count)

    async def results(self, batch_id: str, after: int, count: int) -> list[Result]:
        """Answered lines behind one, in the order of the file."""
        query = (
            "SELECT number, custom_id, status, answer FROM lines"
            " WHERE batch_id = ? AND is_answered = 1 AND number > ? ORDER BY number LIMIT ?"
        )
        rows = await self.database.call(
            lambda db: db.execute(query, (batch_id, after, count)).fetchall()
        )
        return [Result(*row) for row in rows]

    async def has_unrun(self, batch_id: str) -> bool:
        """Whether there are lines that will never run: the window ended before."""
        query = "SELECT 1 FROM lines WHERE batch_id = ? AND is_answered = 1 AND status = ? LIMIT 1"
        values = (batch_id, NEVER_RAN)
        found = await self.database.call(lambda db: db.execute(query, values).fetchone())
        return found is not None


def _answer_line(db: sqlite3.Connection, answer: Answer) -> None:
    where, line = "WHERE batch_id = ? AND number = ?", (answer.batch_id, answer.number)
    done = db.execute(
        f"UPDATE lines SET is_answered = 1, status = ?, answer = ? {where} AND is_answered = 0",
        (answer.status, answer.body, *line),
    )
    if not done.rowcount:
        return
    column = "completed" if 200 <= answer.status < 300 else "failed"
    db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (answer.batch_id,))
    if answer.write is not None:
        db.execute(f"UPDATE lines SET answer = ? {where}", (answer.write(db), *line))


def _check_quota(db: sqlite3.Connection, wish: Wish) -> None:
    marks = ", ".join("?" * len(OPEN))
    query = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({marks})"
    count = int(db.execute(query, (wish.tenant, *OPEN)).fetchone()[0])
    if wish.most_open is not None and count >= wish.most_open:
        raise QuotaExceeded(
            f"this key has {count} batches that are not done, want at most {wish.most_open};"
            " wait for one, or cancel it"
        )


def _get(db: sqlite3.Connection, batch_id: str) -> Batch:
    return Batch(*db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone())

"""Entries: answers in the store, each under its tenant and the key of what was asked.

The key covers everything an answer depends on, so one key has one right answer. A tenant has a
bounded number of entries and bytes; what was not used for longest goes. `index.py` finds entries
that are only similar.
"""

from __future__ import annotations

import json
import sqlite3
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quire.answers.bound import MAX_SEEN, Seen
from quire.answers.features import Vector
from quire.batches.database import Database


class Entry(NamedTuple):
    number: int
    key: bytes
    frame: bytes  # of what was asked, all but the last message
    text: str  # the last message
    answer: str
    tokens: tuple[int, ...]
    finish: str | None  # None: a stop string in the tokens ended it
    stop_reason: int | str | None
    seen: list[Seen]


class NewEntry(NamedTuple):
    tenant: str
    key: bytes
    model: bytes
    frame: bytes
    text: str
    features: Vector
    answer: str
    tokens: Sequence[int]
    finish: str | None
    stop_reason: int | str | None

    @property
    def size(self) -> int:
        """Bytes on the disk, with an embedding as long as the features."""
        words = len(self.text.encode()) + len(self.answer.encode())
        return words + 4 * len(self.tokens) + 2 * self.features.nbytes


class Sketch(NamedTuple):
    """What an index needs to know of an entry."""

    number: int
    key: bytes
    frame: bytes
    features: bytes


class Keeping(NamedTuple):
    max_entries: int  # of one tenant
    max_bytes: int  # the same
    max_age_s: int  # since it was made


COLUMNS = "number, key, frame, text, answer, tokens, finish, stop_reason, seen"


class Entries:
    def __init__(self, database: Database, keeping: Keeping) -> None:
        self.database, self.keeping = database, keeping

    async def get(self, tenant: str, key: bytes) -> Entry | None:
        query = f"SELECT {COLUMNS} FROM answers WHERE tenant = ? AND key = ? AND created_at >= ?"
        values = (tenant, key, self._oldest())
        row = await self.database.call(lambda db: db.execute(query, values).fetchone())
        return None if row is None else _entry(row)

    async def since(
        self, tenant: str, model: bytes, number: int, embedder: bytes = b""
    ) -> list[Sketch]:
        """Entries of a tenant and model made after one, in the order they were made. With an
        embedder: its embeddings, in the order they came."""
        query = (
            "SELECT number, key, frame, features FROM answers"
            " WHERE tenant = ? AND model = ? AND number > ? AND text != '' ORDER BY number"
        )
        values: tuple[object, ...] = (tenant, model, number)
        if embedder:
            query = (
                "SELECT came, key, frame, vector FROM answers JOIN answer_vectors USING (number)"
                " WHERE tenant = ? AND model = ? AND came > ? AND embedder = ? ORDER BY came"
            )
            values = (*values, embedder)
        rows = await self.database.call(lambda db: db.execute(query, values).fetchall())
        return [Sketch(*row) for row in rows]

    def put(self, db: sqlite3.Connection, new: NewEntry) -> None:
        """An answer to what was asked before takes the place of the older one."""
        if new.size > self.keeping.max_bytes:
            return  # it would push out all others, and itself
        now = int(time.time())
        values = {
            "tenant": new.tenant,
            "key": new.key,
            "model": new.model,
            "frame": new.frame,
            "text": new.text,
            "features": new.features.tobytes(),
            "answer": new.answer,
            "tokens": array("i", new.tokens).tobytes(),
            "finish": new.finish,
            "stop_reason": json.dumps(new.stop_reason),
            "created_at": now,
            "used_at": now,
            "size": new.size,
        }
        changed = ("answer", "tokens", "finish", "stop_reason", "created_at", "used_at", "size")
        db.execute(
            f"INSERT INTO answers ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
            " ON CONFLICT (tenant, key) DO UPDATE SET seen = CASE WHEN answer = excluded.answer"
            " THEN seen ELSE '[]' END, "
            + ", ".join(f"{name} = excluded.{name}" for name in changed),
            tuple(values.values()),
        )
        self._make_room(db, new.tenant)

    def embed(self, db: sqlite3.Connection, new: NewEntry, embedder: bytes, vector: Vector) -> None:
        """The embedding of an entry, which may be gone by now."""
        db.execute(
            "INSERT OR REPLACE INTO answer_vectors (number, embedder, vector)"
            " SELECT number, ?, ? FROM answers WHERE tenant = ? AND key = ?",
            (embedder, vector.tobytes(), new.tenant, new.key),
        )

    def used(self, db: sqlite3.Connection, tenant: str, key: bytes) -> None:
        db.execute(
            "UPDATE answers SET used_at = ?, num_hits = num_hits + 1 WHERE tenant = ? AND key = ?",
            (int(time.time()), tenant, key),
        )

    def observe(self, db: sqlite3.Connection, tenant: str, key: bytes, one: Seen) -> None:
        """The answer was made anew beside this one."""
        where, values = "WHERE tenant = ? AND key = ?", (tenant, key)
        row = db.execute(f"SELECT seen FROM answers {where}", values).fetchone()
        if row is not None:
            seen = [*json.loads(row["seen"]), [round(one.gap, 4), int(one.agreed)]][-MAX_SEEN:]
            db.execute(f"UPDATE answers SET seen = ? {where}", (json.dumps(seen), *values))

    async def sweep(self) -> int:
        query, values = "DELETE FROM answers WHERE created_at < ?", (self._oldest(),)
        return await self.database.call(lambda db: db.execute(query, values).rowcount)

    async def forget(self, tenant: str) -> int:
        """All entries of a tenant; how many there were."""
        query = "DELETE FROM answers WHERE tenant = ?"
        return await self.database.call(lambda db: db.execute(query, (tenant,)).rowcount)

    async def summary(self, tenant: str) -> dict[str, int | None]:
        """How many, how often used, how large, and when the oldest was made."""
        query = (
            "SELECT count(*) AS entries, coalesce(sum(num_hits), 0) AS hits,"
            " coalesce(sum(size), 0) AS bytes, min(created_at) AS oldest_at"
            " FROM answers WHERE tenant = ?"
        )
        row = await self.database.call(lambda db: db.execute(query, (tenant,)).fetchone())
        return dict(row)

    async def latest(self, tenant: str, count: int) -> list[dict[str, int | str]]:
        """Those used last, as their owner may read them."""
        query = (
            "SELECT substr(text, 1, 200) AS text, num_hits AS hits, created_at, used_at,"
            " length(tokens) / 4 AS tokens FROM answers WHERE tenant = ?"
            " ORDER BY used_at DESC, number DESC LIMIT ?"
        )
        rows = await self.database.call(lambda db: db.execute(query, (tenant, count)).fetchall())
        return [dict(row) for row in rows]

    def _make_room(self, db: sqlite3.Connection, tenant: str) -> None:
        held = "SELECT count(*), coalesce(sum(size), 0) FROM answers WHERE tenant = ?"
        count, size = db.execute(held, (tenant,)).fetchone()
        if count <= self.keeping.max_entries and size <= self.keeping.max_bytes:
            return
        db.execute(
            "DELETE FROM answers WHERE number IN (SELECT number FROM ("
            " SELECT number, row_number() OVER newest AS place, sum(size) OVER newest AS bytes"
            " FROM answers WHERE tenant = ?"
            " WINDOW newest AS (ORDER BY used_at DESC, number DESC"
            " ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
            ") WHERE place > ? OR bytes > ?)",
            (tenant, self.keeping.max_entries, self.keeping.max_bytes),
        )

    def _oldest(self) -> int:
        return int(time.time()) - self.keeping.max_age_s


def _entry(row: sqlite3.Row) -> Entry:
    tokens = array("i")
    tokens.frombytes(row["tokens"])
    return Entry(
        number=row["number"],
        key=row["key"],
        frame=row["frame"],
        text=row["text"],
        answer=row["answer"],
        tokens=tuple(tokens),
        finish=row["finish"],
        stop_reason=json.loads(row["stop_reason"]),
        seen=[Seen(float(gap), bool(agreed)) for gap, agreed in json.loads(row["seen"])],
    )

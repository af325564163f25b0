"""Records: what is remembered, each under its tenant and id, bounded in age and in bytes.

A record is what was asked and what was answered, as JSON; what either means is the server's
business. A response may name the one it goes on from, so a conversation is a chain of records and
nothing is stored twice. Where a tenant has too much, what was not used for longest goes. Using the
end of a chain uses all of it, so a conversation is forgotten as a whole. `conversations.py` has the
other kind, a list of items.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.batches.database import Database
from quire.batches.files import Page, QuotaExceeded

RESPONSE, CHAT, CONVERSATION = "response", "chat.completion", "conversation"
OPEN = ("queued", "in_progress")
LONGEST_CHAIN = 2_000


class Record(NamedTuple):
    """One row."""

    tenant: str
    id: str
    kind: str
    status: str
    created_at: int
    used_at: int
    size: int
    previous_id: str | None  # the response that this one goes on from
    model: str | None
    metadata: str  # JSON
    asked: bytes  # JSON: the items or messages that were sent
    body: bytes  # JSON: the answer as clients see it
    request: bytes | None  # a response in the background: all that is needed to make it


class NewRecord(NamedTuple):
    """What is to be remembered."""

    tenant: str
    id: str
    kind: str
    asked: bytes
    body: bytes
    status: str = "completed"
    previous_id: str | None = None
    model: str | None = None
    metadata: str = "{}"
    request: bytes | None = None

    def row(self) -> Record:
        now = int(time.time())
        size = len(self.asked) + len(self.body) + len(self.metadata) + len(self.request or b"")
        return Record(
            tenant=self.tenant,
            id=self.id,
            kind=self.kind,
            status=self.status,
            created_at=now,
            used_at=now,
            size=size,
            previous_id=self.previous_id,
            model=self.model,
            metadata=self.metadata,
            asked=self.asked,
            body=self.body,
            request=self.request,
        )


class Bounds(NamedTuple):
    max_age_s: int  # since it was last used
    max_bytes: int  # of one tenant


class Records:
    def __init__(self, database: Database, bounds: Bounds) -> None:
        self.database, self.bounds = database, bounds

    # ------------------------------------------------------------ one

    async def put(self, new: NewRecord) -> None:
        """Raises QuotaExceeded for what is too large by itself."""
        await self.database.call(lambda db: self.put_in(db, new))

    def put_in(self, db: sqlite3.Connection, new: NewRecord) -> None:
        """The same within a transaction. An id that is there is replaced."""
        row = new.row()
        marks = ", ".join("?" * len(row))
        sets = ", ".join(f"{name} = excluded.{name}" for name in row._fields[2:])
        db.execute(
            f"INSERT INTO kept VALUES ({marks}) ON CONFLICT (tenant, id) DO UPDATE SET {sets}", row
        )
        self.make_room(db, row.tenant)

    async def get(self, tenant: str, id: str, kind: str) -> Record | None:
        query = "SELECT * FROM kept WHERE tenant = ? AND id = ? AND kind = ? AND used_at >= ?"
        values = (tenant, id, kind, self._oldest())
        found = await self.database.call(lambda db: db.execute(query, values).fetchone())
        return None if found is None else Record(*found)

    async def delete(self, tenant: str, id: str, kind: str) -> bool:
        query = "DELETE FROM kept WHERE tenant = ? AND id = ? AND kind = ?"
        done = await self.database.call(lambda db: db.execute(query, (tenant, id, kind)).rowcount)
        return done > 0

    async def describe(self, record: Record, metadata: str, body: bytes) -> None:
        """New metadata, and the body that tells it."""
        await self.database.call(
            lambda db: db.execute(
                "UPDATE kept SET metadata = ?, body = ?, size = size + ?"
                " WHERE tenant = ? AND id = ?",
                (
                    *(metadata, body),
                    len(metadata) + len(body) - len(record.metadata) - len(record.body),
                    *(record.tenant, record.id),
                ),
            )
        )

    # ------------------------------------------------------------ chains

    async def chain(self, tenant: str, id: str) -> list[Record]:
        """A response and all it goes on from, oldest first; none when it is not there.

        The oldest has a `previous_id` where something in between was deleted."""
        query = f"""
            WITH RECURSIVE chain(id, previous_id, depth) AS (
                SELECT id, previous_id, 0 FROM kept
                WHERE tenant = :tenant AND id = :id AND kind = '{RESPONSE}' AND used_at >= :oldest
                UNION ALL
                SELECT kept.id, kept.previous_id, depth + 1 FROM kept JOIN chain
                ON kept.id = chain.previous_id
                WHERE kept.tenant = :tenant AND kept.kind = '{RESPONSE}' AND depth < :most
            )
            SELECT kept.* FROM kept JOIN chain USING (id) WHERE kept.tenant = :tenant
            ORDER BY depth DESC"""
        values = {"tenant": tenant, "id": id, "most": LONGEST_CHAIN, "oldest": self._oldest()}
        rows = await self.database.call(lambda db: db.execute(query, values).fetchall())
        return [Record(*row) for row in rows]

    def use(self, db: sqlite3.Connection, tenant: str, ids: Sequence[str]) -> None:
        """Somebody goes on from these: they are the last to be forgotten."""
        now = int(time.time())
        db.executemany(
            "UPDATE kept SET used_at = ? WHERE tenant = ? AND id = ?",
            [(now, tenant, id) for id in ids],
        )

    # ------------------------------------------------------------ in the background

    async def add_open(self, new: NewRecord, most: int) -> None:
        """A response that is to be made; raises QuotaExceeded where so many wait already."""

        def add(db: sqlite3.Connection) -> None:
            query = f"SELECT count(*) FROM kept WHERE tenant = ? AND {_IS_OPEN}"
            count = int(db.execute(query, (new.tenant,)).fetchone()[0])
            if count >= most:
                raise QuotaExceeded(
                    f"this key has {count} responses in the background, want at most {most};"
                    " wait for one, or cancel it"
                )
            self.put_in(db, new)

        await self.database.call(add)

    async def open_records(self) -> list[Record]:
        """Everyone's that are to be made, oldest first."""
        query = f"SELECT * FROM kept WHERE {_IS_OPEN} ORDER BY created_at, rowid"
        rows = await self.database.call(lambda db: db.execute(query).fetchall())
        return [Record(*row) for row in rows]

    async def move(self, record: Record, status: str, body: bytes) -> bool:
        """Change an open response; False where it is open no more."""

        def change(db: sqlite3.Connection) -> bool:
            return self.move_in(db, record, status, body)

        return await self.database.call(change)

    def move_in(self, db: sqlite3.Connection, record: Record, status: str, body: bytes) -> bool:
        done = db.execute(
            "UPDATE kept SET status = ?, body = ?, size = size + ? - length(body)"
            f" WHERE tenant = ? AND id = ? AND {_IS_OPEN}",
            (status, body, len(body), record.tenant, record.id),
        )
        return done.rowcount > 0

    # ------------------------------------------------------------ all

    async def page(
        self, tenant: str, kind: str, page: Page, model: str | None, metadata: Mapping[str, str]
    ) -> list[Record]:
        """One more than the page has, if there are more."""
        where = ["tenant = ?", "kind = ?", "used_at >= ?"]
        values: list[str | int] = [tenant, kind, self._oldest()]
        if model is not None:
            where.append("model = ?")
            values.append(model)
        for key, value in metadata.items():
            where.append("EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ? AND value = ?)")
            values += [key, value]
        if page.after is not None:
            sign = "<" if page.is_descending else ">"
            last = "SELECT created_at, rowid FROM kept WHERE tenant = ? AND id = ?"
            where.append(f"(created_at, rowid) {sign} ({last})")
            values += [tenant, page.after]
        order = "DESC" if page.is_descending else "ASC"
        query = (
            f"SELECT * FROM kept WHERE {' AND '.join(where)}"
            f" ORDER BY created_at {order}, rowid {order} LIMIT ?"
        )
        rows = await self.database.call(
            lambda db: db.execute(query, (*values, page.limit + 1)).fetchall()
        )
        return [Record(*row) for row in rows]

    async def sweep(self) -> int:
        """Forget what nobody used for too long; how many records."""
        query = "DELETE FROM kept WHERE used_at < ?"
        return await self.database.call(lambda db: db.execute(query, (self._oldest(),)).rowcount)

    def make_room(self, db: sqlite3.Connection, tenant: str) -> None:
        """Forget what was not used for longest, until the tenant has no more than it may have."""
        query = "SELECT bytes FROM kept_sizes WHERE tenant = ?"
        most = self.bounds.max_bytes
        while (held := int(db.execute(query, (tenant,)).fetchone()[0])) > most:
            oldest = db.execute(
                f"SELECT id FROM kept WHERE tenant = ? AND NOT {_IS_OPEN}"
                " ORDER BY used_at, rowid LIMIT 2",
                (tenant,),
            ).fetchall()
            if len(oldest) < 2:  # the newest is what somebody wants to keep now
                raise QuotaExceeded(
                    f"what is remembered of this key has {held} bytes, want at most {most};"
                    " delete some, or send store=false"
                )
            db.execute("DELETE FROM kept WHERE tenant = ? AND id = ?", (tenant, oldest[0]["id"]))

    def _oldest(self) -> int:
        """When a record must have been used to be there."""
        return int(time.time()) - self.bounds.max_age_s


_IS_OPEN = "status IN ('queued', 'in_progress')"  # as the index of open records says it

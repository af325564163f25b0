"""Files: what clients upload and what batches write, as plain files beside the database.

A file is known once its row is there; its bytes were complete and on disk before. Bytes without a
row (a crash in between) are swept at the next start. A tenant sees its own files alone.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quire.batches.database import Database
from quire.errors import QuireError

SPOOL = "incoming-"  # uploads that are not complete


class FileRow(NamedTuple):
    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None

    def shape(self) -> dict[str, Any]:
        """OpenAI's File object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class NewFile(NamedTuple):
    tenant: str
    purpose: str
    filename: str
    expires_in: int | None = None  # seconds
    id: str | None = None  # a file made again takes the place of the one before
    most_bytes: int | None = None  # that the tenant may have in all files together


class QuotaExceeded(QuireError):
    """A tenant has all that it may have; the message says of what."""


class Page(NamedTuple):
    """Which part of a list is wanted."""

    limit: int
    after: str | None = None
    is_descending: bool = True


class FileStore:
    def __init__(self, database: Database, folder: Path) -> None:
        self.database, self.folder = database, folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, file_id: str) -> Path:
        return self.folder / file_id

    def new_spool(self) -> Path:
        """Where bytes of unknown fate may be written."""
        return self.folder / f"{SPOOL}{secrets.token_hex(12)}"

    async def keep(self, spool: Path, wish: NewFile) -> FileRow:
        """Make a complete spool a file of the tenant."""
        now = int(time.time())
        row = FileRow(
            id=wish.id or f"file-{secrets.token_hex(12)}",
            tenant=wish.tenant,
            purpose=wish.purpose,
            filename=wish.filename,
            bytes=spool.stat().st_size,
            created_at=now,
            expires_at=None if wish.expires_in is None else now + wish.expires_in,
        )

        def place() -> None:
            with spool.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(spool, self.path(row.id))
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)  # else a power cut may take the name
            finally:
                os.close(folder)

        def store(db: sqlite3.Connection) -> FileRow:
            self._check_quota(db, row, wish.most_bytes)
            db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return row

        await self.database.in_thread(place)
        try:
            return await self.database.call(store)
        except QuotaExceeded:
            self.path(row.id).unlink(missing_ok=True)
            raise

    def _check_quota(self, db: sqlite3.Connection, row: FileRow, most: int | None) -> None:
        if most is None:
            return
        query = "SELECT coalesce(sum(bytes), 0) FROM files WHERE tenant = ?"
        held = int(db.execute(query, (row.tenant,)).fetchone()[0])
        if held + row.bytes > most:
            raise QuotaExceeded(
                f"files of this key have {held} bytes, and {row.bytes} more are above the {most}"
                " it may have; delete some"
            )

    async def get(self, tenant: str, file_id: str) -> FileRow | None:
        query = "SELECT * FROM files WHERE id = ? AND tenant = ? AND coalesce(expires_at, ?) >= ?"
        now = int(time.time())
        found = await self.database.call(
            lambda db: db.execute(query, (file_id, tenant, now, now)).fetchone()
        )
        return None if found is None else FileRow(*found)

    async def page(self, tenant: str, purpose: str | None, page: Page) -> list[FileRow]:
        """One more than the page has, if there are more."""
        rows = await self.database.call(
            lambda db: rows_after(db, "files", tenant, page, {"purpose": purpose})
        )
        return [FileRow(*row) for row in rows]

    async def delete(self, row: FileRow) -> None:
        await self.database.call(lambda db: db.execute("DELETE FROM files WHERE id = ?", (row.id,)))
        with suppress(FileNotFoundError):
            self.path(row.id).unlink()

    async def sweep(self, in_use: Collection[str] = ()) -> int:
        """Remove what expired and is not in use, and bytes that no row knows; how many files."""
        now, kept = int(time.time()), json.dumps(list(in_use))

        def expire(db: sqlite3.Connection) -> set[str]:
            unused = "id NOT IN (SELECT value FROM json_each(?))"
            db.execute(f"DELETE FROM files WHERE expires_at < ? AND {unused}", (now, kept))
            return {row["id"] for row in db.execute("SELECT id FROM files")}

        known = await self.database.call(expire)
        strangers = (path for path in self.folder.iterdir() if path.name not in known)
        stray = [path for path in strangers if path.is_file() and _is_old(path, now)]
        for path in stray:
            with suppress(OSError):
                path.unlink()
        return len(stray)


def rows_after(
    db: sqlite3.Connection, table: str, tenant: str, page: Page, wanted: dict[str, str | None]
) -> list[sqlite3.Row]:
    """A tenant's rows of a table, newest first or last, behind the row `after`."""
    where, values = ["tenant = ?"], [tenant]
    for column, value in wanted.items():
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    if page.after is not None:
        sign = "<" if page.is_descending else ">"
        where.append(
            f"(created_at, rowid) {sign}"
            f" (SELECT created_at, rowid FROM {table} WHERE id = ? AND tenant = ?)"
        )
        values += [page.after, tenant]
    order = "DESC" if page.is_descending else "ASC"
    query = (
        f"SELECT * FROM {table} WHERE {' AND '.join(where)}"
        f" ORDER BY created_at {order}, rowid {order} LIMIT ?"
    )
    return db.execute(query, (*values, page.limit + 1)).fetchall()


def _is_old(path: Path, now: float) -> bool:
    """An upload may be under way, in this process or another."""
    with suppress(FileNotFoundError):
        return now - path.stat().st_mtime > 3_600
    return False

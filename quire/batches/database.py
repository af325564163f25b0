"""Database: one SQLite file in WAL mode, used from one thread of its own.

A call is a function of the connection; it runs in a transaction and is awaited from the event loop,
which never waits for a disk. Several processes may open the same file: SQLite lets one write at a
time and the others wait. What a call returned from is on disk, also after a power cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quire.errors import BadRequest

T = TypeVar("T")

BUSY_S = 20.0  # how long another process may hold the write lock
VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, status TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, metadata TEXT,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
    expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    output_file_id TEXT, error_file_id TEXT, errors TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL,
    begin INTEGER NOT NULL, size INTEGER NOT NULL,
    is_answered INTEGER NOT NULL DEFAULT 0, num_faults INTEGER NOT NULL DEFAULT 0,
    status INTEGER, answer BLOB,
    PRIMARY KEY (batch_id, number)
);
CREATE INDEX IF NOT EXISTS open_lines ON lines (batch_id, number) WHERE is_answered = 0;
CREATE INDEX IF NOT EXISTS files_by_age ON files (tenant, created_at, id);
CREATE INDEX IF NOT EXISTS batches_by_age ON batches (tenant, created_at, id);
"""


class Database:
    def __init__(self, path: Path) -> None:
        """Raises BadRequest for a file that is no database of ours."""
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._connection = self._thread.submit(self._open).result()

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)  # two that make the tables at once would fail
            connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            found = connection.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, VERSION):
                raise BadRequest(
                    f"{self.path} has layout {found}, want {VERSION}; give another --store folder"
                )
            connection.executescript(SCHEMA)
            connection.execute(f"PRAGMA user_version = {VERSION}")
            os.close(lock)
        except (sqlite3.Error, OSError) as error:
            raise BadRequest(
                f"cannot use {self.path} ({error}); give another folder with --store, or --no-store"
            ) from None
        return connection

    async def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction: all of it is kept, or nothing."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._transaction, work)

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = work(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        return found

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Slow work on files, in order with the calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

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

from quire.batches.schema import SCHEMA, STEPS, VERSION
from quire.errors import BadRequest

T = TypeVar("T")

BUSY_S = 20.0  # how long another process may hold the write lock


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
            self._bring_up(connection)
            os.close(lock)
        except (sqlite3.Error, OSError) as error:
            raise BadRequest(
                f"cannot use {self.path} ({error}); give another folder with --store, or --no-store"
            ) from None
        return connection

    def _bring_up(self, connection: sqlite3.Connection) -> None:
        """Tables as they are today, from none or from those of an older version."""
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= found <= VERSION:
            raise BadRequest(
                f"{self.path} has layout {found}, want {VERSION}; give another --store folder"
            )
        steps = "".join(STEPS.get(at, "") for at in range(found or VERSION, VERSION))
        connection.executescript(
            f"BEGIN IMMEDIATE; {steps} {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
        )

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

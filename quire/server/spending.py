"""Spending: what keys have used of their budgets, remembered across restarts.

The numbers that decide are in memory (`routing/budget.py`); the store has a copy, one row for a
key, written behind the request that changed it. Without a store a restart begins a new window.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from quire.batches.database import Database
from quire.obs.log import log_event
from quire.routing.budget import Budget


class Spending:
    def __init__(self, budget: Budget, database: Database | None) -> None:
        self.budget, self._database = budget, database
        self._writing: set[asyncio.Task[None]] = set()

    async def restore(self) -> None:
        """Before the first request."""
        if self._database is None:
            return
        window = self.budget.window
        query = "SELECT tenant, tokens FROM spending WHERE window = ?"
        rows = await self._database.call(lambda db: db.execute(query, (window,)).fetchall())
        for tenant, tokens in rows:
            self.budget.spend(tenant, tokens)

    def spend(self, tenant: str, tokens: int) -> None:
        self.budget.spend(tenant, tokens)
        if self._database is not None:
            row = (tenant, self.budget.window, self.budget.spent(tenant))
            task = asyncio.create_task(self._write(self._database, row))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def flush(self) -> None:
        """All that was spent by now is on the disk."""
        await asyncio.gather(*self._writing)

    async def _write(self, database: Database, row: tuple[str, int, int]) -> None:
        query = "INSERT OR REPLACE INTO spending VALUES (?, ?, ?)"
        try:
            await database.call(lambda db: db.execute(query, row))
        except (sqlite3.Error, OSError) as error:  # the one in memory still counts
            log_event("spending_not_kept", severity=logging.ERROR, reason=str(error))

"""write_down: what is remembered of an answer, on the disk before its client has the last of it.

Of a line of a batch it is written in one transaction with the line's answer: a line that is run
again, because something died, has remembered nothing yet. What is remembered is up to `turns.py`
and `stored_chats.py`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from quire.batches.database import Database
from quire.batches.files import QuotaExceeded
from quire.server import sse
from quire.server.http import HttpRequest


class Memory(NamedTuple):
    write: Callable[[sqlite3.Connection], None]  # may raise QuotaExceeded
    failed: Callable[[Exception], None]  # tells it, in the body too; the answer counts all the same
    body: dict[str, Any]  # of the answer


async def write_down(memory: Memory, request: HttpRequest, database: Database) -> None:
    if request.is_background:
        request.with_answer = partial(_with_line, memory)
        return
    try:
        await database.call(memory.write)
    except (sqlite3.Error, OSError, QuotaExceeded) as error:
        memory.failed(error)


def _with_line(memory: Memory, db: sqlite3.Connection) -> bytes:
    """Within the transaction that answers a line; returns the line's body."""
    db.execute("SAVEPOINT memory")
    try:
        memory.write(db)
    except QuotaExceeded as error:
        db.execute("ROLLBACK TO memory")
        memory.failed(error)
    return sse.encode(memory.body)

"""Conversations: a record with a list of items that responses add to.

An item is JSON with an id; its place in the list never changes. The record's size counts its items,
so a conversation is forgotten as a whole (`records.py`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.batches.files import Page
from quire.kept.records import CONVERSATION, Records

Item = dict[str, Any]


class Found(NamedTuple):
    number: int
    item: Item


class Conversations:
    def __init__(self, records: Records) -> None:
        self.records, self.database = records, records.database

    async def add(self, tenant: str, id: str, items: Sequence[Item]) -> bool:
        """Behind those there are; False where the conversation is not there."""
        return await self.database.call(lambda db: self.add_in(db, tenant, id, items))

    def add_in(self, db: sqlite3.Connection, tenant: str, id: str, items: Sequence[Item]) -> bool:
        key = (tenant, id)
        if not db.execute(f"SELECT 1 FROM kept WHERE {_IS_IT}", key).fetchone():
            return False
        last = "SELECT coalesce(max(number), -1) FROM kept_items WHERE tenant = ? AND owner = ?"
        first = int(db.execute(last, key).fetchone()[0]) + 1
        texts = [json.dumps(item) for item in items]
        db.executemany(
            "INSERT INTO kept_items VALUES (?, ?, ?, ?, ?)",
            [
                (tenant, id, first + i, item["id"], text)
                for i, (item, text) in enumerate(zip(items, texts, strict=True))
            ],
        )
        grown = sum(len(text) for text in texts)
        db.execute(f"UPDATE kept SET size = size + ? WHERE {_IS_IT}", (grown, *key))
        self.records.use(db, tenant, [id])
        self.records.make_room(db, tenant)
        return True

    async def items(self, tenant: str, id: str) -> list[Item]:
        """All of them, in order."""
        query = "SELECT body FROM kept_items WHERE tenant = ? AND owner = ? ORDER BY number"
        rows = await self.database.call(lambda db: db.execute(query, (tenant, id)).fetchall())
        return [json.loads(row["body"]) for row in rows]

    async def page(self, tenant: str, id: str, page: Page) -> list[Item]:
        """One more than the page has, if there are more."""
        where, values = "tenant = ? AND owner = ?", [tenant, id]
        if page.after is not None:
            sign = "<" if page.is_descending else ">"
            last = "SELECT number FROM kept_items WHERE tenant = ? AND owner = ? AND id = ?"
            where += f" AND number {sign} ({last})"
            values += [tenant, id, page.after]
        order = "DESC" if page.is_descending else "ASC"
        query = f"SELECT body FROM kept_items WHERE {where} ORDER BY number {order} LIMIT ?"
        rows = await self.database.call(
            lambda db: db.execute(query, (*values, page.limit + 1)).fetchall()
        )
        return [json.loads(row["body"]) for row in rows]

    async def item(self, tenant: str, id: str, item_id: str) -> Item | None:
        query = "SELECT body FROM kept_items WHERE tenant = ? AND owner = ? AND id = ?"
        found = await self.database.call(
            lambda db: db.execute(query, (tenant, id, item_id)).fetchone()
        )
        return None if found is None else dict(json.loads(found["body"]))

    async def delete_item(self, tenant: str, id: str, item_id: str) -> bool:
        def delete(db: sqlite3.Connection) -> bool:
            where, key = "tenant = ? AND owner = ? AND id = ?", (tenant, id, item_id)
            total = f"SELECT coalesce(sum(length(body)), 0) FROM kept_items WHERE {where}"
            size = int(db.execute(total, key).fetchone()[0])
            done = db.execute(f"DELETE FROM kept_items WHERE {where}", key)
            db.execute(f"UPDATE kept SET size = size - ? WHERE {_IS_IT}", (size, tenant, id))
            return done.rowcount > 0

        return await self.database.call(delete)


_IS_IT = f"tenant = ? AND id = ? AND kind = '{CONVERSATION}'"

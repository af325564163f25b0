"""/v1/conversations: OpenAI's Conversations, lists of items that responses go on from."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import msgspec

from quire.errors import BadRequest
from quire.kept.records import CONVERSATION, NewRecord, Record
from quire.server import sse
from quire.server.batches import check_metadata
from quire.server.fields import decode
from quire.server.files import listed, page_of, shelf_of, tenant_of
from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem
from quire.server.responses_input import read_items
from quire.server.server import Server
from quire.server.stored_items import StoredItem, stored_items
from quire.server.stored_responses import no_path
from quire.server.transcript import Transcript
from quire.server.turns import found_conversation

LIMIT, MOST = 20, 100
MAX_ITEMS = 20  # added at once


class ConversationFields(msgspec.Struct, kw_only=True):
    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


async def create_conversation(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/conversations."""
    shelf = shelf_of(server)
    fields = decode(request, ConversationFields) if request.body else ConversationFields()
    metadata = fields.metadata or {}
    check_metadata(metadata)
    items = _checked(fields.items or [])
    id = f"conv_{secrets.token_hex(16)}"
    body = sse.encode(
        {
            "id": id,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
    )
    tenant = tenant_of(request)
    new = NewRecord(tenant, id, CONVERSATION, b"[]", body, metadata=json.dumps(metadata))
    await shelf.records.put(new)
    await shelf.conversations.add(tenant, id, items)
    return Reply(body)


def _checked(items: list[dict[str, Any]]) -> list[StoredItem]:
    """What could not be shown to a model is refused now and not in the midst of a conversation."""
    if len(items) > MAX_ITEMS:
        raise BadRequest(f"got {len(items)} items, want at most {MAX_ITEMS} at once", param="items")
    read_items(Transcript(), items, "items")
    return stored_items(items, secrets.token_hex(16), "items")


async def conversation(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/conversations/{id}, /v1/conversations/{id}/items, and one of the items."""
    record, item_id = await _found(request, server)
    shelf, tenant = shelf_of(server), tenant_of(request)
    if item_id is None:
        return Reply(record.body)
    if item_id:
        return Reply(sse.encode(await _item(request, server, record, item_id)))
    page = page_of(request, LIMIT, MOST)
    found = await shelf.conversations.page(tenant, record.id, page)
    return Reply(sse.encode(listed(found, page)))


async def change_conversation(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/conversations/{id}: new metadata; POST /v1/conversations/{id}/items: more items."""
    record, item_id = await _found(request, server)
    shelf, fields = shelf_of(server), decode(request, ConversationFields)
    if item_id:
        raise no_path(request)
    if item_id is None:
        metadata = fields.metadata or {}
        check_metadata(metadata)
        body = sse.encode(json.loads(record.body) | {"metadata": metadata})
        await shelf.records.describe(record, json.dumps(metadata), body)
        return Reply(body)
    if not fields.items:
        raise BadRequest("got no items", param="items")
    items = _checked(fields.items)
    await shelf.conversations.add(record.tenant, record.id, items)
    return Reply(sse.encode(_all_of(items)))


def _all_of(items: list[StoredItem]) -> dict[str, Any]:
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"],
        "last_id": items[-1]["id"],
        "has_more": False,
    }


async def delete_conversation(request: HttpRequest, server: Server) -> Reply:
    """DELETE /v1/conversations/{id}, or one of its items."""
    record, item_id = await _found(request, server)
    shelf = shelf_of(server)
    if item_id is None:
        await shelf.records.delete(record.tenant, record.id, CONVERSATION)
        gone = {"id": record.id, "object": "conversation.deleted", "deleted": True}
        return Reply(sse.encode(gone))
    await _item(request, server, record, item_id)
    await shelf.conversations.delete_item(record.tenant, record.id, item_id)
    return Reply(record.body)


async def _found(request: HttpRequest, server: Server) -> tuple[Record, str | None]:
    """The conversation, and what of its items is meant: None: none; "": all."""
    id, slash, rest = request.path_value.partition("/")
    part, _, item_id = rest.partition("/")
    if slash and part != "items":
        raise no_path(request)
    record = await found_conversation(shelf_of(server), tenant_of(request), id)
    return record, item_id if slash else None


async def _item(request: HttpRequest, server: Server, record: Record, item_id: str) -> StoredItem:
    found = await shelf_of(server).conversations.item(record.tenant, record.id, item_id)
    if found is None:
        raise Problem(404, f"no such item: {item_id[:80]!r}", param="id", code="not_found")
    return found

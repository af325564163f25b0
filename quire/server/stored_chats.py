"""/v1/chat/completions/{id}: chat completions that were sent with store=true.

`keep_chat` writes one down before its client has the last of it; the rest lists, reads, describes
and deletes what is stored. Callers see their own alone.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import msgspec

from quire.batches.files import Page
from quire.kept.records import CHAT, NewRecord, Record
from quire.obs.log import log_event
from quire.server import sse
from quire.server.batches import check_metadata
from quire.server.fields import ChatFields, decode
from quire.server.files import listed, page_of, shelf_of, tenant_of
from quire.server.http import HttpRequest, Reply
from quire.server.keeping import Memory, write_down
from quire.server.problems import Problem
from quire.server.server import Server
from quire.server.stored_responses import no_path, page_items

LIMIT, MOST = 20, 100
ECHOED = (
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
    *("tools", "tool_choice", "response_format"),
)
_METADATA = re.compile(r"metadata\[(.{1,64})\]")


class MetadataFields(msgspec.Struct, kw_only=True):
    metadata: dict[str, str] | None


def wants_keeping(fields: ChatFields, request: HttpRequest, server: Server) -> bool:
    """Raises Problem for metadata that cannot be kept."""
    if not fields.store:
        return False
    check_metadata(_metadata(fields))
    if server.shelf is None:
        request.warnings.append("store=true: nothing is stored here (--no-store)")
    return server.shelf is not None


def _metadata(fields: ChatFields) -> dict[str, str]:
    metadata = fields.metadata or {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise Problem(400, "values of metadata are strings where store=true", param="metadata")
    return metadata


async def keep_chat(
    request: HttpRequest, server: Server, fields: ChatFields, body: dict[str, Any]
) -> None:
    """What cannot be stored is answered all the same, and the client is warned if it can be."""
    assert server.shelf is not None
    metadata = _metadata(fields)
    echo = {name: value for name in ECHOED if (value := getattr(fields, name)) is not None}
    new = NewRecord(
        tenant=tenant_of(request),
        id=body["id"],
        kind=CHAT,
        asked=sse.encode(fields.messages),
        body=sse.encode({**echo, **body, "metadata": metadata}),
        model=body["model"],
        metadata=json.dumps(metadata),
    )
    records = server.shelf.records

    def failed(error: Exception) -> None:
        request.warnings.append(f"the completion is not stored: {error}")
        log_event("not_stored", severity=logging.ERROR, id=new.id, reason=str(error))

    memory = Memory(lambda db: records.put_in(db, new), failed, body)
    await write_down(memory, request, records.database)


async def stored_chats(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/chat/completions, oldest first."""
    found = page_of(request, LIMIT, MOST)
    is_descending = request.query.get("order", "asc") == "desc"
    page = Page(found.limit, found.after, is_descending)
    metadata = {
        match[1]: value
        for name, value in request.query.items()
        if (match := _METADATA.fullmatch(name)) is not None
    }
    rows = await shelf_of(server).records.page(
        tenant_of(request), CHAT, page, request.query.get("model"), metadata
    )
    return Reply(sse.encode(listed([json.loads(row.body) for row in rows], page)))


async def stored_chat(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/chat/completions/{id} and /v1/chat/completions/{id}/messages."""
    id, _, part = request.path_value.partition("/")
    if part not in ("", "messages"):
        raise no_path(request)
    record = await _found(request, server, id)
    if not part:
        return Reply(record.body)
    found = page_of(request, LIMIT, MOST)
    page = Page(found.limit, found.after, request.query.get("order", "asc") == "desc")
    messages = [_message(record, i, m) for i, m in enumerate(json.loads(record.asked))]
    return Reply(sse.encode(listed(page_items(messages, page), page)))


def _message(record: Record, number: int, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        content = "\n".join(str(part.get("text") or "") for part in parts)
    shown = {"id": f"{record.id}-{number}", "content_parts": parts, "refusal": None}
    return {**message, **shown, "content": content}


async def update_chat(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/chat/completions/{id}: new metadata."""
    record = await _found(request, server, request.path_value)
    metadata = decode(request, MetadataFields).metadata or {}
    check_metadata(metadata)
    body = sse.encode(json.loads(record.body) | {"metadata": metadata})
    await shelf_of(server).records.describe(record, json.dumps(metadata), body)
    return Reply(body)


async def delete_chat(request: HttpRequest, server: Server) -> Reply:
    record = await _found(request, server, request.path_value)
    await shelf_of(server).records.delete(record.tenant, record.id, CHAT)
    gone = {"id": record.id, "object": "chat.completion.deleted", "deleted": True}
    return Reply(sse.encode(gone))


async def _found(request: HttpRequest, server: Server, id: str) -> Record:
    found = await shelf_of(server).records.get(tenant_of(request), id, CHAT)
    if found is None:
        text = f"no such stored completion: {id[:80]!r}; completions are stored with store=true"
        raise Problem(404, text, param="id", code="not_found")
    return found

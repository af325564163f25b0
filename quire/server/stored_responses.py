"""/v1/responses/{id}: a stored response read, deleted or cancelled, and the items behind it."""

from __future__ import annotations

import json
from typing import Any

from quire.batches.files import Page
from quire.kept.records import OPEN, RESPONSE, Record
from quire.server import sse
from quire.server.files import listed, page_of, shelf_of, tenant_of
from quire.server.http import HttpRequest, Reply
from quire.server.problems import Problem
from quire.server.server import Server
from quire.server.turns import said_in

LIMIT, MOST = 20, 100


async def stored_response(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/responses/{id} and /v1/responses/{id}/input_items."""
    response_id, _, part = request.path_value.partition("/")
    if part == "input_items":
        return await _input_items(request, server, response_id)
    if part:
        raise no_path(request)
    if request.query.get("stream") == "true":
        text = "got stream=true; a stored response is not streamed again, ask without it"
        raise Problem(400, text, param="stream")
    return Reply((await _found(request, server, response_id)).body)


async def _input_items(request: HttpRequest, server: Server, response_id: str) -> Reply:
    """All that the model was shown: what the response goes on from, and its own input."""
    page = page_of(request, LIMIT, MOST)
    record = await _found(request, server, response_id)
    chain = await shelf_of(server).records.chain(tenant_of(request), record.id)
    before = [item for one in chain[:-1] for item in said_in(one)]
    return Reply(sse.encode(listed(page_items([*before, *json.loads(record.asked)], page), page)))


def page_items(items: list[dict[str, Any]], page: Page) -> list[dict[str, Any]]:
    """The wanted part of a list in order of time, and one more if there are more."""
    if page.is_descending:
        items = items[::-1]
    if page.after is not None:
        ids = [item["id"] for item in items]
        items = items[ids.index(page.after) + 1 :] if page.after in ids else []
    return items[: page.limit + 1]


async def delete_response(request: HttpRequest, server: Server) -> Reply:
    """DELETE /v1/responses/{id}. What goes on from it can be read, and not gone on from."""
    record = await _found(request, server, request.path_value)
    await shelf_of(server).records.delete(record.tenant, record.id, RESPONSE)
    await _stop(server, record)
    return Reply(sse.encode({"id": record.id, "object": "response", "deleted": True}))


async def cancel_response(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/responses/{id}/cancel, for responses in the background."""
    response_id, _, verb = request.path_value.partition("/")
    if verb != "cancel":
        raise no_path(request)
    record = await _found(request, server, response_id)
    body = json.loads(record.body)
    if not body["background"]:
        text = f"the response {record.id} is not in the background; close its connection"
        raise Problem(400, text, param="id")
    if record.status in OPEN:
        body["status"] = "cancelled"
        if await shelf_of(server).records.move(record, "cancelled", sse.encode(body)):
            await _stop(server, record)
    return Reply((await _found(request, server, response_id)).body)


async def _stop(server: Server, record: Record) -> None:
    """End its generation, in whichever process that runs."""
    if record.status in OPEN:
        server.abort(record.id)
        if server.siblings is not None:
            await server.siblings.abort(record.id)


async def _found(request: HttpRequest, server: Server, response_id: str) -> Record:
    found = await shelf_of(server).records.get(tenant_of(request), response_id, RESPONSE)
    if found is None:
        raise Problem(404, f"no such response: {response_id[:80]!r}", param="id", code="not_found")
    return found


def no_path(request: HttpRequest) -> Problem:
    return Problem(404, f"no such path: {request.path[:200]}", code="not_found")

"""/v1/batches: OpenAI's Batch API. Here batches are asked for; `batch_runner.py` works on them."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.batches.files import Page
from quire.batches.store import Batch, Wish
from quire.server import sse
from quire.server.fields import decode
from quire.server.files import check_lifetime, listed, page_of, shelf_of, tenant_of
from quire.server.http import HttpRequest, Reply
from quire.server.items import Item, wrong
from quire.server.problems import Problem
from quire.server.server import Server

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
LIMIT, MOST = 20, 100
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
UNITS = {"m": 60, "h": 3_600, "d": 86_400}
LONGEST_S = 14 * 86_400
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])")


class BatchFields(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


async def create_batch(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/batches."""
    shelf, fields = shelf_of(server), decode(request, BatchFields)
    if fields.endpoint not in ENDPOINTS:
        want = ", ".join(ENDPOINTS)
        raise Problem(
            400, f"got endpoint {fields.endpoint[:80]!r}, want one of {want}", param="endpoint"
        )
    window_s = _window(fields.completion_window)
    check_metadata(fields.metadata or {})
    tenant = tenant_of(request)
    source = await shelf.files.get(tenant, fields.input_file_id)
    if source is None:
        text = f"no such file: {fields.input_file_id[:80]!r}"
        raise Problem(404, text, param="input_file_id", code="not_found")
    if source.purpose != "batch":
        text = f"the file {source.id} has purpose {source.purpose!r}, want 'batch'"
        raise Problem(400, text, param="input_file_id")
    wish = Wish(
        tenant=tenant,
        endpoint=fields.endpoint,
        input_file_id=source.id,
        completion_window=fields.completion_window,
        window_s=window_s,
        metadata=fields.metadata,
        output_expires_in=_lifetime(fields.output_expires_after),
        most_open=server.limits.max_open_batches_per_key,
    )
    batch = await shelf.batches.add(wish)
    shelf.wake.set()
    return _reply(batch)


def _window(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST_S:
        raise Problem(
            400,
            f"got completion_window {text[:40]!r}, want a time such as 24h, up to 14d",
            param="completion_window",
        )
    return seconds


def _lifetime(given: dict[str, Any] | None) -> int | None:
    """OpenAI's `output_expires_after`, counted from when an output file is made."""
    if given is None:
        return None
    item = Item(given, "output_expires_after").only(("anchor", "seconds"))
    if item.get("anchor") != "created_at":
        raise wrong("output_expires_after.anchor", item.get("anchor"), "'created_at'")
    return check_lifetime(str(item.get("seconds")), "output_expires_after.seconds")


def check_metadata(metadata: dict[str, str]) -> None:
    too_long = [k for k, v in metadata.items() if len(k) > MAX_KEY or len(v) > MAX_VALUE]
    if len(metadata) > MAX_METADATA or too_long:
        raise Problem(
            400,
            f"metadata may have {MAX_METADATA} keys of {MAX_KEY} characters with values of"
            f" {MAX_VALUE}",
            param="metadata",
        )


async def batches(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/batches, newest first."""
    wanted = page_of(request, LIMIT, MOST)
    page = Page(wanted.limit, wanted.after)
    found = await shelf_of(server).batches.page(tenant_of(request), page)
    return Reply(sse.encode(listed([batch.shape() for batch in found], page)))


async def batch(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/batches/{id}."""
    return _reply(await _found(request, server, request.path_value))


async def cancel_batch(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/batches/{id}/cancel. What is answered by then is in the output file."""
    batch_id, _, verb = request.path_value.partition("/")
    if verb != "cancel":
        raise Problem(404, f"no such path: {request.path[:200]}", code="not_found")
    found = await _found(request, server, batch_id)
    shelf = shelf_of(server)
    moved = await shelf.batches.move(found.id, ("validating", "in_progress"), "cancelling")
    if moved is None and found.status not in ("cancelling", "cancelled"):
        raise Problem(409, f"the batch is {found.status} and cannot be cancelled", code="conflict")
    shelf.wake.set()
    return _reply(moved or found)


async def _found(request: HttpRequest, server: Server, batch_id: str) -> Batch:
    found = await shelf_of(server).batches.get(tenant_of(request), batch_id)
    if found is None:
        raise Problem(404, f"no such batch: {batch_id[:80]!r}", param="id", code="not_found")
    return found


def _reply(batch: Batch) -> Reply:
    return Reply(sse.encode(batch.shape()))

"""/v1/files: OpenAI's Files API. Uploads go to disk as they arrive; callers see their own alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.batches.files import FileRow, NewFile, Page
from quire.server import sse
from quire.server.http import EventStream, HttpRequest, Reply
from quire.server.multipart import Form, Upload, boundary_of, read_form
from quire.server.problems import Problem
from quire.server.server import Server
from quire.server.shelf import Shelf

PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
MAX_FILENAME = 255
LIMIT, MOST = 20, 10_000
HOUR_S, MONTH_S = 3_600, 30 * 24 * 3_600
PART_BYTES = 1 << 18


def shelf_of(server: Server) -> Shelf:
    if server.shelf is None:
        raise Problem(404, "nothing is stored here: the server runs with --no-store")
    return server.shelf


def tenant_of(request: HttpRequest) -> str:
    return request.caller.salt if request.caller is not None else ""


async def upload(request: HttpRequest, server: Server) -> Reply:
    """POST /v1/files. The app has put the body into `request.spool`."""
    shelf, body = shelf_of(server), request.spool
    assert body is not None, "the route table says that this body goes to disk"
    boundary = boundary_of(request.headers.get("content-type", ""))
    form = await server.in_thread(lambda: read_form(body, boundary))
    purpose, expires_in = _purpose(form), _expiry(form)
    found = form.uploads.get("file")
    if found is None:
        raise Problem(400, "the form has no part named file", param="file")
    spool = shelf.files.new_spool()
    try:
        await server.in_thread(lambda: _cut_out(body, found, spool))
        name = Path(found.filename.replace("\\", "/")).name[:MAX_FILENAME] or "upload"
        most = server.limits.max_stored_bytes_per_key
        wish = NewFile(tenant_of(request), purpose, name, expires_in, most_bytes=most)
        row = await shelf.files.keep(spool, wish)
    except OSError as error:
        raise Problem(507, f"the file cannot be stored: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            spool.unlink()
    return _reply(row.shape())


def _purpose(form: Form) -> str:
    purpose = form.fields.get("purpose", "")
    if purpose not in PURPOSES:
        want = ", ".join(PURPOSES)
        raise Problem(400, f"got purpose {purpose[:40]!r}, want one of {want}", param="purpose")
    return purpose


def _expiry(form: Form) -> int | None:
    """Seconds from now, as OpenAI's `expires_after[seconds]`."""
    text = form.fields.get("expires_after[seconds]")
    return None if text is None else check_lifetime(text, "expires_after")


def check_lifetime(given: str, param: str) -> int:
    """Seconds that a file is kept."""
    if not _is_number(given) or not HOUR_S <= int(given) <= MONTH_S:
        raise Problem(
            400, f"got {param} {given[:40]!r}, want {HOUR_S} to {MONTH_S} seconds", param=param
        )
    return int(given)


def _cut_out(body: Path, upload: Upload, spool: Path) -> None:
    with body.open("rb") as source, spool.open("xb") as target:
        source.seek(upload.begin)
        left = upload.end - upload.begin
        while left:
            part = source.read(min(left, 1 << 20))
            target.write(part)
            left -= len(part)


async def files(request: HttpRequest, server: Server) -> Reply:
    """GET /v1/files."""
    page = page_of(request, LIMIT if "limit" in request.query else MOST, MOST)
    rows = await shelf_of(server).files.page(tenant_of(request), request.query.get("purpose"), page)
    return _reply(listed([row.shape() for row in rows], page))


async def file(request: HttpRequest, server: Server) -> Reply | EventStream:
    """GET /v1/files/{id} and /v1/files/{id}/content."""
    file_id, _, part = request.path_value.partition("/")
    row = await _row(request, server, file_id)
    if not part:
        return _reply(row.shape())
    if part != "content":
        raise Problem(404, f"no such path: {request.path[:200]}", code="not_found")
    return EventStream(
        _content(row, shelf_of(server).files.path(row.id), server),
        lambda problem: b"",  # the client misses bytes and knows
        content_type="application/octet-stream",
        headers=((b"content-length", str(row.bytes).encode()),),
    )


async def _content(row: FileRow, path: Path, server: Server) -> AsyncIterator[bytes]:
    """Part by part, as the client takes them: a download of any size costs no memory."""
    try:
        source = path.open("rb")
    except FileNotFoundError:
        raise _no_file(row.id) from None
    with source:
        yield await server.in_thread(lambda: source.read(PART_BYTES))
        while part := await server.in_thread(lambda: source.read(PART_BYTES)):
            yield part


async def delete_file(request: HttpRequest, server: Server) -> Reply:
    row, shelf = await _row(request, server, request.path_value), shelf_of(server)
    if row.id in await shelf.batches.inputs_in_use():
        raise Problem(409, f"a batch reads from {row.id}; cancel it first", code="conflict")
    await shelf.files.delete(row)
    return _reply({"id": row.id, "object": "file", "deleted": True})


async def _row(request: HttpRequest, server: Server, file_id: str) -> FileRow:
    row = await shelf_of(server).files.get(tenant_of(request), file_id)
    if row is None:
        raise _no_file(file_id)
    return row


def _no_file(file_id: str) -> Problem:
    return Problem(404, f"no such file: {file_id[:80]!r}", param="id", code="not_found")


def page_of(request: HttpRequest, limit: int, most: int) -> Page:
    """`limit`, `after` and `order` of a list."""
    query = request.query
    text = query.get("limit", str(limit))
    if not _is_number(text) or not 1 <= int(text) <= most:
        raise Problem(400, f"got limit={text[:20]!r}, want 1 to {most}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Problem(400, f"got order={order[:20]!r}, want asc or desc", param="order")
    return Page(int(text), query.get("after"), order == "desc")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def listed(items: list[dict[str, Any]], page: Page) -> dict[str, Any]:
    """OpenAI's list object. `items` may have one more than the page: then there are more."""
    shown = items[: page.limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > page.limit,
    }


def _reply(value: dict[str, Any]) -> Reply:
    return Reply(sse.encode(value))

"""Files and batches without an engine: parsing, bounds, states, and what a torn moment leaves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire.batches import lines as line_checks
from quire.batches.database import Database
from quire.batches.files import FileStore, NewFile, Page
from quire.batches.lines import check_lines, read_body
from quire.batches.output import write_outputs
from quire.batches.store import Answer, BatchStore, OpenLine, Wish
from quire.errors import BadRequest
from quire.request import Request
from quire.server.batch_runner import BatchRunner, Feed
from quire.server.http import HttpRequest, Reply
from quire.server.link import Tap
from quire.server.multipart import boundary_of, read_form
from quire.server.problems import Problem
from quire.server.routes import batch_handlers
from quire.server.server import Server
from quire.server.shelf import Shelf
from tests.server.fakes import Bench

URL = "/v1/completions"


def text_of(*bodies: dict[str, Any], **fields: Any) -> bytes:
    entries = [
        {"custom_id": str(i), "method": "POST", "url": URL, "body": body, **fields}
        for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_file"),
        (b"\n \r\n", "empty_file"),
        (b"nonsense", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (text_of({}, method="GET"), "invalid_method"),
        (text_of({}, url="/v1/models"), "mismatched_url"),
        (text_of({}, {}, custom_id="same"), "duplicate_custom_id"),
        (text_of({}, custom_id=""), "invalid_custom_id"),
        (text_of({"stream": True}), "invalid_body"),
        (text_of({"a": "x" * 300}), "line_too_long"),
        (text_of(*[{}] * 7), "too_many_requests"),
    ],
)
def test_a_file_is_refused_for_one_bad_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, code: str
) -> None:
    monkeypatch.setattr(line_checks, "MAX_LINE_BYTES", 300 if b"xxx" in data else 1 << 20)
    monkeypatch.setattr(line_checks, "MAX_LINES", 6)
    path = tmp_path / "lines"
    path.write_bytes(data)
    assert [error.code for error in check_lines(path, URL).errors] == [code]


def test_bodies_are_found_again(tmp_path: Path) -> None:
    """Red when a place in the file is off by a blank line or a line break."""
    path = tmp_path / "lines"
    bodies = [{"prompt": f"über {i}"} for i in range(4)]
    raw = text_of(*bodies).split(b"\n")
    path.write_bytes(b"\r\n".join([raw[0], b"", *raw[1:4]]))
    checked = check_lines(path, URL)
    assert checked.errors == []
    assert [read_body(path, p.begin, p.size) for p in checked.places] == bodies


def form(*parts: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    body = b"".join(
        b"--XX\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    )
    return body + b"--XX" + end


def test_forms(tmp_path: Path) -> None:
    path = tmp_path / "body"
    content = b"\r\n--X not the end\r\n\r\n--XY\r\n"
    path.write_bytes(form(('name="purpose"', b"batch"), ('name="file"; filename="a b.x"', content)))
    found = read_form(path, b"XX")
    assert found.fields == {"purpose": "batch"}
    upload = found.uploads["file"]
    assert upload.filename == "a b.x"
    assert path.read_bytes()[upload.begin : upload.end] == content
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing",
        form(("name=a", b"x"), end=b"?"),
        form(("name=a", b"x"))[:-8],
        form(("nothing", b"x")),
        form(("name=a", b"x" * 5_000)),
        form(*[("name=a", b"x")] * 20),
        b"--XX\r\n" + b"a" * 10_000 + b"\r\n\r\n--XX--\r\n",
    ],
)
def test_broken_forms(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "body"
    path.write_bytes(body)
    with pytest.raises(Problem) as caught:
        read_form(path, b"XX")
    assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "a/b; boundary=x"])
def test_other_types(kind: str) -> None:
    with pytest.raises(Problem):
        boundary_of(kind)


def wish(tenant: str = "a", window_s: int = 60) -> Wish:
    return Wish(tenant, URL, "file-1", "24h", window_s, None)


def test_an_answer_is_kept_once(tmp_path: Path) -> None:
    """Red when a second answer to a line replaces the first, or counts."""

    async def work() -> None:
        shelf = Shelf(tmp_path)
        store = shelf.batches
        batch = await store.add(wish())
        path = tmp_path / "in"
        path.write_bytes(text_of({}, {}))
        await store.begin(batch.id, check_lines(path, URL).places)
        assert await store.begin(batch.id, []) is None  # only once
        await store.answer([Answer(batch.id, 1, 200, b'"first"')])
        await store.answer(
            [Answer(batch.id, 1, 500, b'"second"'), Answer(batch.id, 0, 400, b'"bad"')]
        )
        found = await store.get("a", batch.id)
        assert found is not None and (found.completed, found.failed) == (1, 1)
        assert [r.answer for r in await store.results(batch.id, -1, 9)] == [b'"bad"', b'"first"']
        first = await write_outputs(found, store, shelf.files)
        again = await write_outputs(found, store, shelf.files)  # a crash before it was noted
        assert first == again and len(await shelf.files.page("a", None, Page(9))) == 2
        shelf.close()

    asyncio.run(work())


def test_states_move_one_way(tmp_path: Path) -> None:
    async def work() -> None:
        store = BatchStore(Database(tmp_path / "db"))
        batch = await store.add(wish())
        assert await store.move(batch.id, ("validating", "in_progress"), "cancelling")
        assert await store.begin(batch.id, []) is None  # its file was read too late
        assert await store.move(batch.id, ("in_progress",), "finalizing") is None
        assert [b.id for b in await store.open_batches()] == [batch.id]
        assert await store.move(batch.id, ("cancelling",), "cancelled")
        assert await store.open_batches() == []
        store.database.close()

    asyncio.run(work())


def test_files_are_swept_and_paged(tmp_path: Path) -> None:
    async def work() -> None:
        store = FileStore(Database(tmp_path / "db"), tmp_path / "files")
        ids = []
        for i in range(5):
            spool = store.new_spool()
            spool.write_bytes(b"x" * i)
            row = await store.keep(spool, NewFile("a", "batch", f"{i}", -1 if i == 4 else None))
            ids.append(row.id)
        assert await store.get("a", ids[4]) is None  # expired
        assert await store.get("b", ids[0]) is None
        page = await store.page("a", "batch", Page(2, after=ids[3]))
        assert [row.id for row in page] == [ids[2], ids[1], ids[0]]  # and there are more
        await store.sweep()
        rows = await store.page("a", None, Page(9, is_descending=False))
        assert [row.bytes for row in rows] == [0, 1, 2, 3]
        store.database.close()

    asyncio.run(work())


def test_one_process_works_on_batches(tmp_path: Path) -> None:
    first, second = Shelf(tmp_path), Shelf(tmp_path)
    assert first.try_own() and first.try_own() and not second.try_own()
    first.close()
    assert second.try_own()
    second.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "quire.sqlite").write_bytes(b"this is no database, but long enough to be one" * 99)
    with pytest.raises(BadRequest, match=r"quire\.sqlite.*--store"):
        Shelf(tmp_path)


def test_lines_of_two_batches_take_turns(tmp_path: Path) -> None:
    """Red when every place that becomes free goes to the batch that came first."""
    bench = Bench()
    shelf = bench.server.shelf = Shelf(tmp_path)
    url, count = "/v1/chat/completions", 40

    def text(who: str) -> str:
        bodies = [{"messages": [{"role": "user", "content": who}]} for _ in range(count)]
        lines = [{"custom_id": str(at), "body": body} for at, body in enumerate(bodies)]
        return "\n".join(json.dumps(x | {"method": "POST", "url": url}) for x in lines)

    lock, feed = asyncio.Lock(), bench.link._feed

    async def one_by_one(request: Request, tap: Tap) -> None:
        async with lock:
            await asyncio.sleep(0.005)
            await feed(request, tap)

    bench.link._feed = one_by_one  # type: ignore[method-assign]

    async def work() -> None:
        for who in ("one", "two"):
            (spool := shelf.files.new_spool()).write_text(text(who))
            file = await shelf.files.keep(spool, NewFile(who, "batch", "lines.jsonl", None))
            await shelf.batches.add(Wish(who, url, file.id, "24h", 60, None))
        task = asyncio.create_task(BatchRunner(bench.server, shelf, batch_handlers()).run())
        async with asyncio.timeout(30):
            while await shelf.batches.open_batches():
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(work())
    submitted, decode = bench.link.submitted, bench.link.tokenizer.decode
    told = [decode(request.tokens[: request.num_prompt].tolist()) for request in submitted]
    assert len(told) == 2 * count
    assert sum("two" in prompt for prompt in told[:count]) > count // 4


def test_lines_that_begin_together_let_others_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when all lines that may run are made ready in one turn of the loop, before which nobody
    else is heard."""
    num_turns, began = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    async def handler(request: HttpRequest, server: Server) -> Reply:
        began[num_turns] += 1
        return Reply(b"{}")

    async def at_once(work: Any, *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", at_once)
    bench, shelf = Bench(), Shelf(tmp_path)
    (tmp_path / "lines").write_bytes(text_of({}))
    monkeypatch.setattr(shelf.files, "path", lambda file_id: tmp_path / "lines")

    async def work() -> None:
        runner = BatchRunner(bench.server, shelf, {URL: handler})
        batch = await shelf.batches.add(Wish("me", URL, "file", "24h", 60, None))
        (place,) = check_lines(tmp_path / "lines", URL).places
        line = OpenLine(0, place.custom_id, place.begin, place.size, 0)
        clock = asyncio.ensure_future(count_turns())
        await asyncio.gather(*(runner._answer(Feed(batch), line) for _ in range(40)))
        clock.cancel()

    asyncio.run(work())
    assert sum(began.values()) == 40 and max(began.values()) == 1

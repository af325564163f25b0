"""Bounds on what a key may store, and lines of batches that keep out of everyone's way."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from quire.answers.entries import Entries, Keeping, NewEntry
from quire.answers.features import features
from quire.batches.database import Database
from quire.batches.files import FileStore, NewFile, QuotaExceeded
from quire.batches.lines import Place
from quire.batches.output import write_outputs
from quire.batches.schema import VERSION
from quire.batches.store import Answer, BatchStore, Wish
from quire.config import SchedConfig
from quire.grammar.live import LiveMatchers
from quire.grammar.matcher import GrammarCompiler
from quire.grammar.pending import GrammarQueue
from quire.params import SamplingParams, StructuredOutputsParams
from quire.request import BACKGROUND, Request
from quire.sched.fair import FairLine
from quire.sched.queue import WaitingLine
from quire.sched.window import has_company
from quire.server import files
from quire.server.chat import chat_completions
from quire.server.http import HttpRequest
from quire.server.shelf import Shelf
from tests.server.asgi import Call, call
from tests.server.fakes import Bench

URL = "/v1/completions"


def shelved(folder: Path, **settings: Any) -> Bench:
    bench = Bench(**settings)
    bench.server.shelf = Shelf(folder)
    return bench


def wish(**fields: Any) -> Wish:
    return Wish("a", URL, "file-1", "24h", 60, None, **fields)


def form(data: bytes, *fields: tuple[str, str]) -> bytes:
    parts = [
        f'--XX\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields
    ]
    head = '--XX\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    return "".join(parts).encode() + head.encode() + data + b"\r\n--XX--\r\n"


def test_a_key_has_a_quota_of_bytes_and_of_batches(tmp_path: Path) -> None:
    """Red when one key can fill the disk, or another's files count for it."""

    async def work() -> None:
        store = FileStore(Database(tmp_path / "db"), tmp_path / "files")

        async def keep(tenant: str, size: int) -> None:
            spool = store.new_spool()
            spool.write_bytes(b"x" * size)
            await store.keep(spool, NewFile(tenant, "batch", "f", most_bytes=10))

        await keep("a", 6)
        with pytest.raises(QuotaExceeded, match="6 bytes, and 5 more"):
            await keep("a", 5)
        await keep("b", 10)
        await keep("a", 4)
        assert len(list(store.folder.iterdir())) == 3  # what was refused is gone
        batches = BatchStore(store.database)
        first = await batches.add(wish(most_open=1))
        with pytest.raises(QuotaExceeded, match="1 batches"):
            await batches.add(wish(most_open=1))
        await batches.move(first.id, ("validating",), "cancelled")
        await batches.add(wish(most_open=1))
        store.database.close()

    asyncio.run(work())


def test_an_upload_past_the_quota_is_told_so(tmp_path: Path) -> None:
    bench = shelved(tmp_path)
    bench.server.limits = type(bench.server.limits)(max_stored_bytes_per_key=100)
    head = {"content-type": "multipart/form-data; boundary=XX"}

    async def work() -> list[Call]:
        body = form(b"y" * 60, ("purpose", "batch"))
        return [await call(bench.app, "POST", "/v1/files", body, **head) for _ in range(2)]

    first, second = asyncio.run(work())
    assert first.status == 200, first.body
    assert (second.status, second.json()["error"]["code"]) == (429, "insufficient_quota")


def test_output_files_expire_when_asked(tmp_path: Path) -> None:
    """Red when output_expires_after is taken and forgotten."""

    async def work() -> None:
        shelf = Shelf(tmp_path)
        batch = await shelf.batches.add(wish(output_expires_in=3_600))
        (tmp_path / "in").write_bytes(b"")
        await shelf.batches.begin(batch.id, [Place(0, "0", 0, 0)])
        await shelf.batches.answer([Answer(batch.id, 0, 200, b"{}")])
        made = await write_outputs(batch, shelf.batches, shelf.files)
        assert made.output is not None
        row = await shelf.files.get("a", made.output)
        assert row is not None and row.expires_at == row.created_at + 3_600
        shelf.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"anchor": "created_at", "seconds": 5}, "output_expires_after.seconds"),
        ({"anchor": "last_used", "seconds": 3_600}, "output_expires_after.anchor"),
        ({"anchor": "created_at", "seconds": 3_600, "more": 1}, "output_expires_after.more"),
    ],
)
def test_a_lifetime_that_is_none(tmp_path: Path, given: dict[str, Any], param: str) -> None:
    bench = shelved(tmp_path)

    async def work() -> Call:
        body = form(b"{}", ("purpose", "batch"))
        kind = "multipart/form-data; boundary=XX"
        file = await call(bench.app, "POST", "/v1/files", body, **{"content-type": kind})
        asked = {
            "input_file_id": file.json()["id"],
            "endpoint": URL,
            "completion_window": "24h",
            "output_expires_after": given,
        }
        return await call(bench.app, "POST", "/v1/batches", asked)

    reply = asyncio.run(work())
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_a_download_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a file is read whole before its first byte is sent."""
    monkeypatch.setattr(files, "PART_BYTES", 10)
    bench, data = shelved(tmp_path), bytes(range(95))

    async def work() -> tuple[Call, Call]:
        shelf = bench.server.shelf
        assert shelf is not None
        spool = shelf.files.new_spool()
        spool.write_bytes(data)
        row = await shelf.files.keep(spool, NewFile("", "batch", "f"))
        got = await call(bench.app, "GET", f"/v1/files/{row.id}/content")
        shelf.files.path(row.id).unlink()
        return got, await call(bench.app, "GET", f"/v1/files/{row.id}/content")

    got, lost = asyncio.run(work())
    assert got.body == data and got.num_writes >= 10
    assert got.headers["content-length"] == "95"
    assert got.headers["content-type"] == "application/octet-stream"
    assert lost.status == 404


def test_an_older_store_goes_on(tmp_path: Path) -> None:
    """Red when a store of the first version is refused, or its batches are lost."""
    path = tmp_path / "db"
    old = sqlite3.connect(path)
    Database(tmp_path / "new").close()
    columns = "id, tenant, status, endpoint, input_file_id, completion_window"
    with sqlite3.connect(tmp_path / "new") as made:
        (ddl,) = made.execute("SELECT sql FROM sqlite_master WHERE name = 'batches'").fetchone()
    old.executescript(ddl.replace(", output_expires_in INTEGER", "") + "; PRAGMA user_version = 1")
    values = "'b1', 'a', 'completed', '/v1/x', 'f', '24h', 1, 2"
    old.execute(f"INSERT INTO batches ({columns}, created_at, expires_at) VALUES ({values})")
    old.commit()
    old.close()
    database = Database(path)
    found = asyncio.run(BatchStore(database).get("a", "b1"))
    assert found is not None and found.output_expires_in is None
    database.close()
    assert sqlite3.connect(path).execute("PRAGMA user_version").fetchone() == (VERSION,)


def test_answers_without_a_size_are_made_anew(tmp_path: Path) -> None:
    """Red when a store of the second version is refused, or has answers that count nothing."""
    path = tmp_path / "db"
    Database(path).close()
    with sqlite3.connect(path) as old:
        (ddl,) = old.execute("SELECT sql FROM sqlite_master WHERE name = 'answers'").fetchone()
        without = ddl.replace(", size INTEGER NOT NULL DEFAULT 0", "")
        assert without != ddl
        old.executescript(f"DROP TABLE answers; {without}; PRAGMA user_version = 2")
        old.execute(
            "INSERT INTO answers (tenant, key, model, frame, text, features, answer, tokens,"
            " stop_reason, created_at, used_at) VALUES ('a', '', '', '', '', '', '', '', '', 1, 1)"
        )
    old.close()
    entries = Entries(Database(path), Keeping(3, 1 << 20, 100))
    new = NewEntry("a", b"k", b"m", b"f", "text", features("text"), "answer", [1], None, None)
    asyncio.run(entries.database.call(lambda db: entries.put(db, new)))
    held = asyncio.run(entries.summary("a"))
    assert (held["entries"], held["bytes"]) == (1, new.size)
    entries.database.close()


# ------------------------------------------------------------ out of the way


def ask(bench: Bench, is_background: bool) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    request = HttpRequest("POST", "/v1/chat/completions", {}, {}, "r1", body)
    request.is_background = is_background
    asyncio.run(cast(Any, chat_completions(request, bench.server)))


def test_lines_of_batches_are_in_no_latency() -> None:
    """Red when hours that a line waited end up in the percentiles people look at."""
    bench = Bench()
    ask(bench, True)
    summary = bench.server.metrics.summary()
    assert summary["tokens"]["generated"] > 0 and summary["requests"]["finished"]["stop"] == 1
    assert set(summary["average_latency_s"].values()) == {None}
    ask(bench, False)
    assert bench.server.metrics.summary()["average_latency_s"]["ttft"] is not None


def test_lines_of_batches_do_not_close_the_batch_window() -> None:
    """Red when waiting lines make somebody's request go without the company it waits for."""
    config = SchedConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, batch_wait_tokens=10
    )
    for line in (WaitingLine(lambda request: request.timing.arrival), FairLine()):
        params = SamplingParams(max_tokens=1)
        line.push(Request.new(1, [1] * 50, params, priority=BACKGROUND))
        assert not has_company(config, line)
        line.push(Request.new(2, [1] * 12, params))
        assert has_company(config, line)
        while len(line):
            line.pop()
        assert line.num_tokens == 0


class SlowCompiler:
    """Notes the order of its work, and waits to be let go."""

    def __init__(self) -> None:
        self.order: list[str | None] = []
        self.go = threading.Event()

    def compile(self, params: StructuredOutputsParams) -> None:
        self.order.append(params.regex)
        self.go.wait(5)


def test_grammars_of_lines_are_compiled_last() -> None:
    """Red when a batch of schemas stands before somebody's request in the engine."""
    compiler = SlowCompiler()
    queue = GrammarQueue(cast(GrammarCompiler, compiler), LiveMatchers())

    def submit(id: int, name: str, priority: int) -> None:
        wanted = SamplingParams(structured_outputs=StructuredOutputsParams(regex=name))
        queue.submit(Request.new(id, [1], wanted, priority=priority))

    for id in range(3):
        submit(id, f"line{id}", BACKGROUND)
    while not compiler.order:
        pass  # the first is under way
    submit(9, "mine", 0)
    compiler.go.set()
    while len(queue):
        queue.collect(lambda request: None)
    assert compiler.order == ["line0", "mine", "line1", "line2"]


def test_lines_of_batches_have_a_checker_of_their_own() -> None:
    bench = Bench()
    bench.server._checker = bench.server._background_checker = None
    bench.link.greet()
    assert bench.server.checker(True) is not bench.server.checker(False)


def test_a_browser_may_delete(tmp_path: Path) -> None:
    bench = shelved(tmp_path, cors_origins=("https://a.example",))
    reply = asyncio.run(call(bench.app, "OPTIONS", "/v1/files/x", origin="https://a.example"))
    assert reply.status == 204 and "DELETE" in reply.headers["access-control-allow-methods"]

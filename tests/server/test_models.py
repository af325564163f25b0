"""Several models behind one port: who answers, who waits, and what is told of their states."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from quire.batches.files import NewFile
from quire.batches.lines import check_lines
from quire.batches.store import Batch, Wish
from quire.config import EngineArgs
from quire.obs.exposition import merged
from quire.request import Request
from quire.server import batch_runner
from quire.server import models as models_module
from quire.server.batch_runner import BatchRunner
from quire.server.link import EngineLink, Tap
from quire.server.model_files import ModelFolder, ModelState
from quire.server.models import Models
from quire.server.routes import batch_handlers
from quire.server.server import Server
from quire.server.settings import Limits, ModelSettings, ServeSettings
from quire.server.shelf import Shelf
from tests.server.fakes import Bench, FakeLink, OpenChecker

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


class Two(Bench):
    """`tiny`, which is loaded, and `other`, which is not; `lost` cannot be read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(limits=Limits(queue_timeout_s=0.4))
        other = replace(self.settings, served_model_names=("other",))
        self.other = FakeLink(self.link.tokenizer)
        link = cast("EngineLink", self.other)
        made = Server(other, self.link.tokenizer, link, cast("Any", OpenChecker()))
        self.folders = [ModelFolder(folder / name) for name in ("tiny", "other")]
        for each in self.folders:
            each.path.mkdir()
        self.folders[0].tell(ModelState("ready", memory=5))
        self.models = Models([self.server, made], self.folders, {"lost": "no config.json"})

    def chat(self, model: str | None) -> Any:
        return self.post("/v1/chat/completions", BODY | ({"model": model} if model else {}))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    yield Two(tmp_path)


def test_a_request_goes_to_the_model_it_names(two: Two) -> None:
    """Red when a request is answered by another model than the one it names."""
    two.other.greet()
    for name, link in (("other", two.other), ("tiny", two.link), (None, two.link)):
        before = len(link.submitted)
        reply = two.chat(name)
        assert reply.status_code == 200 and reply.json()["model"] == (name or "tiny")
        assert len(link.submitted) == before + 1
    reply = two.chat("nobody")
    assert reply.status_code == 404 and "served: tiny, other" in reply.text
    assert two.folders[1].take_wish() is None  # nobody had to be loaded


def test_a_parked_engine_is_asked_to_come_back(two: Two) -> None:
    """Red when a request goes to an engine without weights, or nobody tells it to return."""
    two.other.greet()
    two.other.is_parked = True
    two.folders[1].tell(ModelState("parked"))

    async def work() -> Any:
        async def bring() -> None:
            while two.folders[1].take_wish() != "load":
                await asyncio.sleep(0.01)
            two.folders[1].tell(ModelState("loading"))
            assert two.other.submitted == []
            two.other.is_parked = False

        bringing = asyncio.ensure_future(bring())
        reply = await two.send("/v1/chat/completions", BODY | {"model": "other"})
        await bringing
        return reply

    assert asyncio.run(work()).status_code == 200
    assert len(two.other.submitted) == 1


def test_who_came_as_it_was_told_to_leave_brings_it_back(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when requests wait in a parked engine that nobody wakes."""
    monkeypatch.setattr(models_module, "TOUCH_S", 0.01)
    two.other.greet()
    two.other.is_parked = True

    async def work() -> None:
        running = asyncio.ensure_future(two.models.run())
        await asyncio.sleep(0.1)
        assert two.folders[1].take_wish() is None  # nobody waits
        two.other._tasks[1] = asyncio.ensure_future(asyncio.sleep(0))
        await asyncio.sleep(0.1)
        assert two.folders[1].take_wish() == "load"
        running.cancel()

    asyncio.run(work())


def test_a_model_that_is_not_there_is_asked_for(two: Two) -> None:
    """Red when a request for an unloaded model fails at once, or does not ask for it."""

    async def work() -> Any:
        async def load() -> None:
            while two.folders[1].take_wish() != "load":
                await asyncio.sleep(0.01)
            two.folders[1].tell(ModelState("loading"))
            two.other.greet()

        loading = asyncio.ensure_future(load())
        reply = await two.send("/v1/chat/completions", BODY | {"model": "other"})
        await loading
        return reply

    assert asyncio.run(work()).json()["model"] == "other"


def test_who_waits_too_long_is_told_why(two: Two) -> None:
    two.folders[1].tell(ModelState("loading", "waits for memory that other models have"))
    reply = two.chat("other")
    assert reply.status_code == 503 and "waits for memory" in reply.text
    assert reply.headers["retry-after"] == "5"
    two.folders[1].tell(ModelState("failed", "no tensors"))
    reply = two.chat("other")
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "model_failed"
    assert "no tensors" in reply.text and "/admin/models/load" in reply.text
    reply = two.chat("lost")
    assert reply.status_code == 503 and "no config.json" in reply.text
    assert two.chat("tiny").status_code == 200  # none the worse


def test_states_are_listed(two: Two) -> None:
    listed = {m["id"]: m for m in two.get("/v1/models").json()["data"]}
    assert {name: m["state"] for name, m in listed.items()} == {
        "tiny": "ready",
        "other": "unloaded",
        "lost": "failed",
    }
    assert listed["tiny"]["memory"] == 5 and listed["lost"]["reason"] == "no config.json"
    assert two.get("/v1/models/other").json()["state"] == "unloaded"
    assert two.get("/ready").status_code == 200
    two.models._loading.add("other")
    two.folders[1].tell(ModelState("loading"))
    reply = two.get("/ready")
    assert reply.status_code == 503 and reply.json()["reason"] == "loading: other"


def test_verbs(two: Two) -> None:
    for verb in ("load", "park", "unload"):
        reply = two.post(f"/admin/models/{verb}", {"model": "other"})
        assert reply.json() == {"model": "other", "asked": verb, "was": "unloaded"}
        assert two.folders[1].take_wish() == verb
    assert two.post("/admin/models/load", {"model": "nobody"}).status_code == 404
    alone = Bench()
    assert alone.post("/admin/models/load", {"model": "tiny"}).status_code == 400


def test_metrics_of_all(two: Two) -> None:
    """Red when a scrape has a family twice, or a series without its model."""
    text = two.get("/metrics").text
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert all('model_name="' in line for line in series)
    said = b"# HELP a b\n# TYPE a gauge\na 1\n"
    assert merged({"x": said, 'y"': said}) == (
        b'# HELP a b\n# TYPE a gauge\na{model_name="x"} 1\na{model_name="y\\""} 1\n'
    )


def test_settings_of_one_of_them() -> None:
    engines = [EngineArgs(model=name) for name in "ab"]
    models = tuple(ModelSettings(name=e.model, engine=e) for e in engines)
    own = ServeSettings(engine=engines[0], models=models).of_model(1, "/run/b")
    assert (own.engine, own.served_model_names) == (engines[1], ("b",))
    assert (own.runtime_folder, own.models) == ("/run/b", ())


def test_a_batch_runs_while_the_first_model_is_away(two: Two, tmp_path: Path) -> None:
    """Lines for a model that is there are answered, and one for a parked model brings it back.

    Red when batches stand still because the model that was named first is parked or failed."""
    two.link.hello = None
    two.folders[0].tell(ModelState("parked"))
    two.other.greet()
    shelf = two.server.shelf = Shelf(tmp_path / "store")
    two.models.servers[1].shelf = shelf
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in (("a", BODY | {"model": "other"}), ("b", BODY | {"model": "tiny"}))
    ]

    async def load() -> None:
        while two.folders[0].take_wish() != "fill":  # nobody has to go for a batch
            await asyncio.sleep(0.01)
        two.link.greet()

    counts = asyncio.run(done_beside(two, shelf, lines, load()))
    assert counts == {"total": 2, "completed": 2, "failed": 0}


async def done_beside(
    two: Two, shelf: Shelf, lines: list[dict[str, Any]], *others: Coroutine[Any, Any, None]
) -> object:
    """Counts of a batch of these lines, once it is done."""
    spool = shelf.files.new_spool()
    spool.write_text("\n".join(map(json.dumps, lines)))
    file = await shelf.files.keep(spool, NewFile("", "batch", "lines.jsonl", None))
    runner = BatchRunner(two.server, shelf, batch_handlers())
    tasks = [asyncio.create_task(work) for work in (runner.run(), *others)]
    wish = {"input_file_id": file.id, "endpoint": lines[0]["url"], "completion_window": "24h"}
    batch = (await two.send("/v1/batches", wish)).json()
    try:
        async with asyncio.timeout(20):
            while batch["status"] != "completed":
                await asyncio.sleep(0.02)
                found = await shelf.batches.get("", batch["id"])
                assert found is not None
                batch = found.shape()
                for task in tasks:
                    if task.done():
                        task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return batch["request_counts"]


@pytest.mark.parametrize("has_faults", [True, False])
def test_batches_without_room_let_others_go_on(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_faults: bool
) -> None:
    """Red when lines whose model is away keep every place, or one that must run alone keeps all
    others from starting."""
    monkeypatch.setattr(batch_runner, "POLL_S", 0.02)
    monkeypatch.setattr(batch_runner, "ALONE_S", 0.05)
    shelf = two.server.shelf = Shelf(tmp_path / "store")
    two.models.servers[1].shelf = shelf
    url = "/v1/chat/completions"

    async def add(model: str, count: int) -> Batch:
        body = BODY | {"model": model}
        lines = [
            {"custom_id": f"{i}", "method": "POST", "url": url, "body": body} for i in range(count)
        ]
        (spool := shelf.files.new_spool()).write_text("\n".join(map(json.dumps, lines)))
        file = await shelf.files.keep(spool, NewFile("me", "batch", "lines.jsonl", None))
        batch = await shelf.batches.add(Wish("me", url, file.id, "24h", 60, None))
        places = check_lines(shelf.files.path(file.id), url).places
        found = await shelf.batches.begin(batch.id, places)
        assert found is not None
        return found

    async def done(batch: Batch) -> Batch:
        while (found := await shelf.batches.get("me", batch.id)) and found.status != "completed":
            await asyncio.sleep(0.01)
        assert found is not None
        return found

    async def work() -> None:
        count = 1 if has_faults else two.server.background_places
        stuck = [await add("other", 2) for _ in range(count)]
        if has_faults:
            await shelf.batches.fault(stuck[0].id, 0)
        runner = asyncio.create_task(BatchRunner(two.server, shelf, batch_handlers()).run())
        async with asyncio.timeout(5):
            while not two.folders[1].take_wish():
                await asyncio.sleep(0.01)
            for _ in range(2):  # whatever the first found by chance
                assert (await done(await add("tiny", 2))).completed == 2
            assert two.other.submitted == []
            two.other.greet()
            for batch in stuck:
                assert (await done(batch)).completed == 2
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)

    asyncio.run(work())


def test_a_batch_gives_way_to_a_request_for_another_model(
    two: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a model counts as used for the lines of a batch, when these go on while somebody
    waits for its memory, or when one of them is lost for it."""
    monkeypatch.setattr(models_module, "TOUCH_S", 0.01)
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)
    shelf = two.server.shelf = Shelf(tmp_path / "store")
    tiny, other = two.folders
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": f"{i}", "method": "POST", "url": url, "body": BODY | {"model": "tiny"}}
        for i in range(3)
    ]
    feed, is_stuck = two.link._feed, True

    async def stuck(request: Request, tap: Tap) -> None:
        while is_stuck:
            await asyncio.sleep(0.01)
        await feed(request, tap)

    two.link._feed = stuck  # type: ignore[method-assign]

    async def visit() -> None:
        nonlocal is_stuck
        while two.link.num_open < 3 or not (tiny.path / "worked").exists():
            await asyncio.sleep(0.01)
        assert not (tiny.path / "used").exists()
        other.tell(ModelState("loading", "waits for memory", waits_for=("tiny",)))
        visitor = asyncio.ensure_future(two.send(url, BODY | {"model": "other"}))
        while two.link.num_open or (tiny.path / "worked").exists():
            await asyncio.sleep(0.01)
        num_submitted = len(two.link.submitted)
        await asyncio.sleep(0.1)
        assert len(two.link.submitted) == num_submitted, "a line came all the same"
        two.other.greet()
        other.tell(ModelState("ready"))
        assert (await visitor).status_code == 200
        is_stuck = False
        await asyncio.Event().wait()

    counts = asyncio.run(done_beside(two, shelf, lines, two.models.run(), visit()))
    assert counts == {"total": 3, "completed": 3, "failed": 0}

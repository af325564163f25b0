"""`model: "auto"`: who answers, what is told of it, and answers that are given up unheard."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from quire.batches.files import NewFile
from quire.batches.store import Wish
from quire.errors import BadRequest
from quire.routing.settings import AutoSettings, BudgetSettings, CascadeSettings, Rule, read_auto
from quire.server import batch_runner
from quire.server.batch_runner import BatchRunner
from quire.server.link import EngineLink
from quire.server.model_files import ModelFolder, ModelState
from quire.server.models import Models
from quire.server.routes import batch_handlers
from quire.server.server import Server
from quire.server.shelf import Shelf
from quire.server.spending import Spending
from tests.server.fakes import Bench, FakeLink, OpenChecker

CHAT = "/v1/chat/completions"
WHO = (('"cascade"', '"tiny"'), ('"escalated"', '"large"'))
SURE, UNSURE = -0.001, -9.0  # no token of the fake has a logprob of this or less


class Pair(Bench):
    """`tiny` and `large`; logprobs of the fake engine are between -1 and 0."""

    def __init__(self, folder: Path, shelf: Shelf | None = None, **auto: Any) -> None:
        super().__init__()
        self.server.shelf = shelf
        self.big = FakeLink(self.link.tokenizer)
        self.big.answer = "A long and learned answer."
        settings = replace(self.settings, served_model_names=("large",))
        link = cast("EngineLink", self.big)
        other = Server(settings, self.link.tokenizer, link, cast("Any", OpenChecker()))
        self.big.greet()
        folders = [ModelFolder(folder / name) for name in ("tiny", "large")]
        for each in folders:
            each.path.mkdir(parents=True)
            each.tell(ModelState("ready"))
        self.folders = folders
        self.models = Models([self.server, other], folders, {})
        self.models.choose_by(AutoSettings(small="tiny", large="large", **auto))

    def ask(self, text: str = "Hi", path: str = CHAT, **fields: Any) -> Any:
        body = {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}
        return self.post(path, body)


def cascade(limit: float) -> dict[str, Any]:
    return {"cascade": CascadeSettings(tokens=4, mean_logprob=limit)}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_will_not_do_is_never_heard(tmp_path: Path, stream: bool) -> None:
    """Red when a token of the small model's answer is sent before it was given up, or when the
    large one's comes without the reason."""
    pair = Pair(tmp_path, **cascade(SURE))
    reply = pair.ask(stream=stream, temperature=0)
    assert reply.headers["x-quire-route"].startswith("large; reason=escalated; mean_logprob=-")
    assert texts(reply.text, stream) == pair.big.answer
    assert len(pair.link.submitted) == len(pair.big.submitted) == 1
    assert pair.link.num_open == 0 and pair.server.admission.num_open == 0
    found = [x for x in pair.get("/metrics").text.splitlines() if x.startswith("quire:route_req")]
    counted = {(word in line, model in line) for line in found for word, model in WHO}
    assert len(found) == 2 and counted == {(True, True), (False, False)}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_will_do_is_the_small_models_own(tmp_path: Path, stream: bool) -> None:
    """Red when holding an answer back changes it, or shows logprobs that nobody asked for."""
    pair = Pair(tmp_path, **cascade(UNSURE))
    reply = pair.ask(stream=stream, temperature=0)
    named = pair.post(
        CHAT, {"messages": [{"role": "user", "content": "Hi"}], "stream": stream, "temperature": 0}
    )
    assert reply.headers["x-quire-route"] == "tiny; reason=cascade"
    assert texts(reply.text, stream) == texts(named.text, stream) == "Hello there."
    assert not pair.big.submitted
    if not stream:
        body = reply.json()
        assert body["model"] == "tiny" and body["choices"][0]["logprobs"] is None


def texts(body: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 8}),
        ("/v1/responses", {"input": "Hi", "store": False}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}], "stream": False}),
    ],
)
def test_every_api_may_leave_the_choice(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    pair = Pair(tmp_path, **cascade(SURE))
    reply = pair.post(path, {"model": "auto", **body})
    assert reply.status_code == 200, reply.text
    assert "reason=escalated" in reply.headers["x-quire-route"] and "A long" in reply.text


def test_what_has_no_answer_has_no_choice(tmp_path: Path) -> None:
    pair = Pair(tmp_path, **cascade(SURE))
    reply = pair.post("/v1/embeddings", {"model": "auto", "input": "Hi"})
    assert reply.status_code == 400 and "name a model here: tiny, large" in reply.text
    assert {m["id"] for m in pair.get("/v1/models").json()["data"]} == {"tiny", "large", "auto"}
    assert Bench().post(CHAT, {"model": "auto", "messages": []}).status_code in (400, 404)


def test_rules_come_first(tmp_path: Path) -> None:
    """Red when a rule is asked after the cascade, or when its conditions are not all needed."""
    rules = (
        Rule(model="large", name="proofs", regex="(?i)prove", max_chars=20),
        Rule(model="large", tools=True),
    )
    pair = Pair(tmp_path, rules=rules, **cascade(UNSURE))
    assert pair.ask("Prove it.").headers["x-quire-route"] == "large; reason=rule; rule=proofs"
    assert pair.ask("Prove that there are many primes.").headers["x-quire-route"].startswith("tiny")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert pair.ask("Hi", tools=[tool]).headers["x-quire-route"] == "large; reason=rule; rule=2"


def test_a_key_has_a_budget_of_the_large_model(tmp_path: Path) -> None:
    """Red when a key goes on with the large model after its budget, or pays for the small one."""
    pair = Pair(tmp_path, budget=BudgetSettings(tokens=30), **cascade(SURE))
    assert "escalated" in pair.ask().headers["x-quire-route"]
    reply = pair.ask()
    assert reply.headers["x-quire-route"].startswith("tiny; reason=cascade")  # not judged: no money
    assert texts(reply.text, False) == "Hello there."
    assert len(pair.big.submitted) == 1
    rich = Pair(tmp_path / "rich", budget=BudgetSettings(tokens=10_000), **cascade(SURE))
    assert all("escalated" in rich.ask().headers["x-quire-route"] for _ in range(3))


def spending_of(pair: Pair) -> Spending:
    assert pair.models.auto is not None and pair.models.auto.spending is not None
    return pair.models.auto.spending


def test_a_restart_forgets_no_spending(tmp_path: Path) -> None:
    """Red when a key gets its budget anew by a restart of the server."""
    shelf = Shelf(tmp_path / "store")
    pair = Pair(tmp_path / "one", budget=BudgetSettings(tokens=30), shelf=shelf, **cascade(SURE))

    async def spend() -> None:
        body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}]}
        reply = await pair.send(CHAT, body)
        assert "escalated" in reply.headers["x-quire-route"]
        await spending_of(pair).flush()

    asyncio.run(spend())
    again = Pair(tmp_path / "two", budget=BudgetSettings(tokens=30), shelf=shelf, **cascade(SURE))
    asyncio.run(spending_of(again).restore())
    assert again.ask().headers["x-quire-route"] == "tiny; reason=cascade"
    shelf.close()


def test_a_model_that_failed_is_not_chosen(tmp_path: Path) -> None:
    pair = Pair(tmp_path, **cascade(SURE))
    pair.folders[1].tell(ModelState("failed", "no tensors"))
    reply = pair.ask()
    assert reply.headers["x-quire-route"] == "tiny; reason=unavailable; large failed to load"
    pair.folders[1].tell(ModelState("ready"))
    pair.folders[0].tell(ModelState("failed", "no tensors"))
    assert pair.ask().headers["x-quire-route"].startswith("large; reason=unavailable")


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"small": "a", "large": "a", "rules": []}, "want two models"),
        ({"small": "a", "large": "c"}, "want one of a, b"),
        ({"small": "a", "large": "b"}, "a route, a cascade or rules"),
        ({"small": "a", "large": "b", "threshold": 0.5}, "without route"),
        ({"small": "a", "large": "b", "cascade": {"tokens": 0}}, "1 to 1024"),
        ({"small": "a", "large": "b", "cascade": {}}, "mean_logprob or min_logprob"),
        ({"small": "a", "large": "b", "rules": [{"model": "a", "regex": "("}]}, "regex"),
        ({"small": "a", "large": "b", "rules": [{"model": "a", "colour": 1}]}, "has colour"),
        ({"small": "a", "large": "b", "budget": {"tokens": True}}, "want int"),
        ({"small": "a", "large": "b", "route": "no.json"}, "cannot be read"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, table: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        read_auto(table, ["a", "b"], tmp_path)


def test_a_line_that_waits_for_the_large_model_asks_the_small_one_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the small model answers anew whenever the line looks whether the large is there."""
    monkeypatch.setattr(batch_runner, "POLL_S", 0.02)
    pair = Pair(tmp_path / "models", **cascade(SURE))
    shelf = Shelf(tmp_path / "store")
    for server in pair.models.servers:
        server.shelf = shelf
    pair.big.hello = None
    pair.folders[1].tell(ModelState("unloaded"))
    body = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}

    async def work() -> None:
        (spool := shelf.files.new_spool()).write_text(json.dumps(line))
        file = await shelf.files.keep(spool, NewFile("me", "batch", "lines.jsonl", None))
        await shelf.batches.add(Wish("me", CHAT, file.id, "24h", 60, None))
        runner = asyncio.create_task(BatchRunner(pair.server, shelf, batch_handlers()).run())
        async with asyncio.timeout(5):
            for _ in range(3):
                while pair.folders[1].take_wish() != "fill":
                    await asyncio.sleep(0.01)
            pair.big.greet()
            while await shelf.batches.open_batches():
                await asyncio.sleep(0.01)
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)

    asyncio.run(work())
    assert len(pair.link.submitted) == len(pair.big.submitted) == 1
    text = pair.get("/metrics").text
    found = [x for x in text.splitlines() if x.startswith("quire:route_req")]
    assert [x.rsplit(" ", 1)[1] for x in found] == ["1.0", "1.0"]

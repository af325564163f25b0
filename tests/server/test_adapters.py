"""Adapters over HTTP: named as models, loaded and unloaded while requests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine import commands as msg
from quire.request import Request
from quire.server.link import Tap
from quire.server.problems import Refused
from quire.step import TokenEvent
from tests.server.fakes import Bench

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
SQL = msg.AdapterInfo("sql", "/adapters/sql", 8, 1_000)


@pytest.fixture
def bench() -> Bench:
    made = Bench(api_keys=("key",), admin_keys=("boss",))
    made.link.adapters["sql"] = SQL
    return made


def post(bench: Bench, path: str, body: dict[str, Any], key: str = "boss") -> Any:
    return bench.post(path, body, authorization=f"Bearer {key}")


def answer_asks(bench: Bench) -> list[msg.Command]:
    """An engine that does what it is told, and refuses folders called bad."""
    seen: list[msg.Command] = []

    async def ask(make: Callable[[int], msg.Command]) -> None:
        command = make(len(seen))
        seen.append(command)
        if isinstance(command, msg.LoadAdapter):
            if command.path == "/bad":
                raise Refused("there is no folder /bad")
            made = msg.AdapterInfo(command.name, command.path, 4, 10)
            bench.link.adapters[command.name] = made
        elif isinstance(command, msg.UnloadAdapter):
            del bench.link.adapters[command.name]

    bench.link.ask = ask  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", BODY),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**BODY, "max_tokens": 5}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/chat", {**BODY, "stream": False}),
    ],
)
def test_a_request_names_its_adapter(bench: Bench, path: str, body: dict[str, Any]) -> None:
    """Red when an endpoint forgets the adapter, or keeps it for the next request."""
    bench.link.pool = lambda ids: [1.0]
    for model, adapter in (("sql", "sql"), ("tiny", "")):
        reply = post(bench, path, {**body, "model": model}, "key")
        assert reply.status_code == 200, reply.text
        assert bench.link.submitted[-1].adapter_name == adapter
        assert reply.json()["model"] == model


def test_it_is_listed_and_unknown_ones_are_not_found(bench: Bench) -> None:
    async def get(path: str) -> Any:
        async with bench.client() as client:
            return await client.get(path, headers={"authorization": "Bearer key"})

    import asyncio

    listed = asyncio.run(get("/v1/models")).json()["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in listed] == [
        ("tiny", "tiny", None),
        ("sql", "/adapters/sql", "tiny"),
    ]
    assert asyncio.run(get("/v1/models/sql")).json()["parent"] == "tiny"
    assert post(bench, "/v1/chat/completions", {**BODY, "model": "lost"}, "key").status_code == 404


def test_loading_and_unloading(bench: Bench) -> None:
    seen = answer_asks(bench)
    body = {"lora_name": "new", "lora_path": "/adapters/new"}
    reply = post(bench, "/v1/load_lora_adapter", body)
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    assert "already" in post(bench, "/v1/load_lora_adapter", body).json()["error"]["message"]
    post(bench, "/v1/load_lora_adapter", {**body, "load_inplace": True})
    reply = post(bench, "/v1/unload_lora_adapter", {"lora_name": "new", "lora_int_id": 3})
    assert reply.text == "Success: LoRA adapter 'new' removed successfully."
    assert post(bench, "/v1/unload_lora_adapter", {"lora_name": "new"}).status_code == 404
    kinds = [type(command).__name__ for command in seen]
    assert kinds == ["LoadAdapter", "UnloadAdapter", "LoadAdapter", "UnloadAdapter"]


def test_what_cannot_be_loaded(bench: Bench) -> None:
    """Red when a bad folder is a server error, or a user without the admin key reads folders."""
    answer_asks(bench)
    body = {"lora_name": "x", "lora_path": "/bad"}
    reply = post(bench, "/v1/load_lora_adapter", body)
    assert reply.status_code == 400 and "no folder /bad" in reply.text
    assert post(bench, "/v1/load_lora_adapter", body, "key").status_code == 403
    for name in ("tiny", ""):
        reply = post(bench, "/v1/load_lora_adapter", {**body, "lora_name": name})
        assert reply.status_code == 400


def test_an_adapter_unloaded_on_the_way_to_the_engine_is_not_found(bench: Bench) -> None:
    """Red when a request that names an adapter which has just gone is told that the server is at
    fault: clients would try it again, and a line of a batch would be lost to a 500."""

    async def feed(request: Request, tap: Tap) -> None:
        tap.put(TokenEvent(request.id, (), "error", error=msg.ADAPTER_GONE))

    bench.link._feed = feed  # type: ignore[method-assign]
    for path, body in (("/v1/chat/completions", BODY), ("/v1/completions", {"prompt": "Hi"})):
        reply = post(bench, path, {**body, "model": "sql"}, "key")
        assert reply.status_code == 404, reply.text
        assert reply.json()["error"]["code"] == "model_not_found"
        assert "'sql'" in reply.text and "load_lora_adapter" in reply.text

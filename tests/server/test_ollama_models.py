"""What Ollama's clients ask besides answers: models, embeddings, versions, and what is refused."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import ollama
import pytest
from hypothesis import given, settings

from quire.models.sequence_head import Verdict
from quire.server.ollama_input import OllamaEmbedFields
from tests.server.asgi import call
from tests.server.fakes import MAX_MODEL_LEN, Bench, chat_tokenizer
from tests.server.shapes import JSON, bodies
from tests.server.test_ollama import client

EMBED = "/api/embed"


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.link.pool = lambda ids: [float(len(ids)), 4.0, 0.0]
    return made


# ------------------------------------------------------------ models


def test_list() -> None:
    """Red when a client finds no model to choose, or one that it cannot then ask for."""
    bench = Bench(served_model_names=("tiny", "org/other:7b"))

    async def work() -> ollama.ListResponse:
        listed = await client(bench).list()
        for model in listed.models:
            await client(bench).show(str(model.model))
        return listed

    first, second = asyncio.run(work()).models
    assert (first.model, second.model) == ("tiny:latest", "org/other:7b")
    assert (first.size, first.digest) == (1_000, "ab" * 32)
    assert first.modified_at is not None and first.modified_at.year == 2026
    assert first.details is not None
    assert (first.details.format, first.details.quantization_level) == ("gguf", "Q8_0")
    assert first.details.family == "fake"


def test_a_loading_engine_lists_and_runs_nothing(bench: Bench) -> None:
    """Red when a list of models waits for the engine, or a model is said to run before it does."""
    assert [model["name"] for model in bench.get("/api/ps").json()["models"]] == ["tiny:latest"]
    bench.link.hello = None
    assert [model["name"] for model in bench.get("/api/tags").json()["models"]] == ["tiny:latest"]
    assert bench.get("/api/ps").json() == {"models": []}
    assert bench.post("/api/show", {"model": "tiny"}).status_code == 503


def test_show() -> None:
    bench = Bench(default_sampling={"temperature": 0.2, "repetition_penalty": 1.1})
    shown = asyncio.run(client(bench).show("tiny"))
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "fake"
    assert shown.modelinfo["fake.context_length"] == MAX_MODEL_LEN
    assert shown.modelinfo["fake.embedding_length"] == 8
    assert shown.capabilities == ["completion", "embedding", "tools", "thinking"]
    assert shown.parameters is not None
    assert shown.parameters.splitlines()[:2] == ["temperature 0.2", "repeat_penalty 1.1"]
    assert shown.template == bench.server.tokenizer.chat_template
    assert bench.post("/api/show", {"name": "tiny"}).status_code == 200  # the field's older name
    unknown = bench.post("/api/show", {"name": "other"})
    assert unknown.status_code == 404 and "model 'other' not found" in unknown.json()["error"]


def test_capabilities_are_the_models_own() -> None:
    """Red when a client offers tools, thoughts or a chat to a model that has none."""
    bench = Bench()
    bench.server.tokenizer = chat_tokenizer("{{ messages[0].content }}")
    shown = bench.post("/api/show", {"model": "tiny"}).json()
    assert shown["capabilities"] == ["completion", "embedding"]
    judge = Bench(Verdict(("no", "yes"), "softmax"))
    assert judge.post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["embedding"]


def test_ps(bench: Bench) -> None:
    (running,) = asyncio.run(client(bench).ps()).models
    assert (running.name, running.context_length) == ("tiny:latest", MAX_MODEL_LEN)
    assert (running.size, running.size_vram) == (1_000, 0)
    assert running.expires_at is not None and running.expires_at.year == 9999


def test_the_first_questions_of_a_client(bench: Bench) -> None:
    """Red when a client that looks whether anybody is there finds nobody."""
    assert asyncio.run(call(bench.app, "HEAD", "/")).status == 200
    assert bench.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/api/pull", "quire pull"),
        ("POST", "/api/push", "quire serve"),
        ("POST", "/api/create", "quire serve"),
        ("POST", "/api/copy", "--served-model-name"),
        ("DELETE", "/api/delete", "quire serve"),
    ],
)
def test_models_are_not_changed(bench: Bench, method: str, path: str, said: str) -> None:
    """Red when a client believes that it changed something, or is not told who could."""
    answer = asyncio.run(call(bench.app, method, path, {"model": "tiny"}))
    assert answer.status == 400 and said in answer.json()["error"]


# ------------------------------------------------------------ embeddings


def test_embed(bench: Bench) -> None:
    """Red when vectors are not those of their texts, in order, of length 1."""
    found = asyncio.run(client(bench).embed("tiny", ["a b c", "a"]))
    sizes = [request.num_prompt for request in bench.link.submitted]
    for vector, size in zip(found.embeddings, sizes, strict=True):
        assert vector == pytest.approx([size / math.hypot(size, 4), 4 / math.hypot(size, 4), 0])
    assert found.prompt_eval_count == sum(sizes) and isinstance(found.total_duration, int)
    (short,) = asyncio.run(client(bench).embed("tiny", "a", dimensions=1)).embeddings
    assert short == [1.0]


def test_the_older_embeddings(bench: Bench) -> None:
    found = asyncio.run(client(bench).embeddings("tiny", "a"))
    assert found.embedding == [bench.link.submitted[-1].num_prompt, 4.0, 0.0]
    assert bench.post("/api/embeddings", {"prompt": ""}).json() == {"embedding": []}


def test_long_inputs_are_cut_unless_told_not_to(bench: Bench) -> None:
    """Red when a text beyond the context, or beyond what is tokenised at all, is an error."""
    for text in ("x " * 20_000, "x " * 200_000):
        assert bench.post(EMBED, {"input": text}).status_code == 200
        assert bench.link.submitted[-1].num_prompt == MAX_MODEL_LEN - 1
        refused = bench.post(EMBED, {"input": [text], "truncate": False})
        assert refused.status_code == 400 and "max_model_len" in refused.json()["error"]


@pytest.mark.parametrize("empty", [{}, {"input": ""}, {"input": []}])
def test_nothing_to_embed_is_a_request_to_load(bench: Bench, empty: dict[str, Any]) -> None:
    reply = bench.post(EMBED, empty)
    assert (reply.status_code, reply.json()["embeddings"]) == (200, [])
    assert bench.link.submitted == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(bodies({"input": "hi"}, OllamaEmbedFields.__struct_fields__) | JSON)
def test_no_body_breaks_the_server(body: Any) -> None:
    """Red when some JSON body is a 5xx."""
    bench = Bench()
    bench.link.pool = lambda ids: [1.0] * 8
    for path in (EMBED, "/api/embeddings", "/api/show"):
        assert bench.post(path, body).status_code in (200, 400, 404), body

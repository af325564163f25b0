"""A served classifier: scores, ranks and labels through all processes, as transformers has them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.models.tiny import tiny_model
from quire.models.tiny_configs import labels
from tests.e2e.harness import Served

QUERY = "which animal purrs?"
DOCUMENTS = ["a railway timetable", "a cat", "naïve café"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reranker")
    return tiny_model("Qwen3ForSequenceClassification", made, **labels(1))


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[Served]:
    with Served(folder, "--device", "cpu") as server:
        yield server
        server.wait_idle()


def post(server: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    data = json.dumps(body).encode()
    head = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, data, head)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def expected(folder: Path) -> list[float]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = []
    for document in DOCUMENTS:
        ids = tokenizer(QUERY, document, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores.append(model(ids).logits[0, 0].item())
    return scores


def test_pairs_and_ranks(reranker: Served, folder: Path) -> None:
    """Red when the two texts, the head or the order is lost between the processes."""
    want = expected(folder)
    body = {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}
    status, said = post(reranker, "/score", body)
    assert status == 200
    assert [d["score"] for d in said["data"]] == pytest.approx(want, abs=1e-4)
    _, ranked = post(reranker, "/v2/rerank", {"query": QUERY, "documents": DOCUMENTS})
    order = sorted(range(len(want)), key=lambda i: -want[i])
    assert [r["index"] for r in ranked["results"]] == order
    squashed = torch.tensor(want).sigmoid()[order].tolist()
    assert [r["relevance_score"] for r in ranked["results"]] == pytest.approx(squashed, abs=1e-4)


def test_the_rest_of_it(reranker: Served) -> None:
    status, said = post(reranker, "/classify", {"input": DOCUMENTS})
    assert status == 200 and {d["label"] for d in said["data"]} == {"LABEL_0"}
    status, said = post(reranker, "/v1/embeddings", {"input": DOCUMENTS})
    assert status == 200 and len(said["data"][0]["embedding"]) == 32
    status, said = post(reranker, "/v1/completions", {"prompt": "a"})
    assert status == 400 and "cannot generate" in said["error"]["message"]

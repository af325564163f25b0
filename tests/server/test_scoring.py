"""Scores, ranks and classes over HTTP, in the shapes vLLM's clients read."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest

from quire.models.sequence_head import Verdict
from tests.server.fakes import MODEL, Bench

ONE_LABEL = Verdict(("relevant",), "sigmoid")
LABELS = Verdict(("bad", "good", "odd"), "softmax")


def length_pool(ids: list[int]) -> list[float]:
    """Numbers that tell prompts apart."""
    return [float(len(ids)), float(ids[-1])]


def bench(verdict: Verdict | None = None, **settings: Any) -> Bench:
    made = Bench(verdict, **settings)
    made.link.pool = length_pool
    return made


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected_cosine(a: list[int], b: list[int]) -> float:
    x, y = length_pool(a), length_pool(b)
    return (x[0] * y[0] + x[1] * y[1]) / (math.hypot(*x) * math.hypot(*y))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_cosines_without_a_head(path: str) -> None:
    """Red when a text is paired with the wrong one, or embedded more than once."""
    made = bench()
    encode = made.server.tokenizer.encode
    said = made.post(path, {"model": MODEL, "text_1": "ab", "text_2": ["cd", "efghz"]}).json()
    assert said["object"] == "list" and said["id"].startswith("score-")
    assert [d["index"] for d in said["data"]] == [0, 1]
    for d, other in zip(said["data"], ("cd", "efghz"), strict=True):
        assert d["object"] == "score"
        assert d["score"] == pytest.approx(expected_cosine(encode("ab"), encode(other)))
    assert len(made.link.submitted) == 3
    assert said["usage"]["prompt_tokens"] == sum(r.num_prompt for r in made.link.submitted)


def test_each_with_its_own() -> None:
    made = bench()
    encode = made.server.tokenizer.encode
    ones, others = ["a", "bcd"], ["efg", "h"]
    said = made.post("/score", {"queries": ones, "documents": others}).json()
    for d, one, other in zip(said["data"], ones, others, strict=True):
        assert d["score"] == pytest.approx(expected_cosine(encode(one), encode(other)))


def test_a_head_reads_both_texts_at_once() -> None:
    """Red when a cross-encoder sees one text alone, or its number is not squashed."""
    made = bench(ONE_LABEL)
    encode = made.server.tokenizer.encode
    made.link.pool = lambda ids: [len(ids) / 10]
    body = {"text_1": "ab", "text_2": ["cd", "efg"]}
    said = made.post("/v1/score", body).json()
    prompts = [r.tokens[: r.num_prompt].tolist() for r in made.link.submitted]
    assert prompts == [encode("ab") + encode("cd"), encode("ab") + encode("efg")]
    assert {r.params.pooling for r in made.link.submitted} == {"classify"}
    want = [sigmoid(len(prompt) / 10) for prompt in prompts]
    assert [d["score"] for d in said["data"]] == pytest.approx(want)
    plain = made.post("/v1/score", {**body, "use_activation": False}).json()
    assert [d["score"] for d in plain["data"]] == [len(prompt) / 10 for prompt in prompts]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks(path: str) -> None:
    """Red when documents come in another order than their scores, or lose their place."""
    made = bench(ONE_LABEL)
    made.link.pool = lambda ids: [len(ids) / 10]
    documents: list[Any] = ["a", "abc", {"text": "ab"}, "xyz"]
    said = made.post(path, {"query": "q", "documents": documents}).json()
    assert [r["index"] for r in said["results"]] == [1, 3, 2, 0], "equal ones as they came"
    assert [r["document"]["text"] for r in said["results"]] == ["abc", "xyz", "ab", "a"]
    scores = [r["relevance_score"] for r in said["results"]]
    assert scores == sorted(scores, reverse=True)
    best = made.post(
        path, {"query": "q", "documents": documents, "top_n": 2, "return_documents": False}
    ).json()
    assert [r["index"] for r in best["results"]] == [1, 3]
    assert "document" not in best["results"][0]


def test_classes() -> None:
    made = bench(LABELS)
    made.link.pool = lambda ids: [0.0, float(len(ids)), 1.0]
    said = made.post("/classify", {"input": ["ab", "c"]}).json()
    assert said["id"].startswith("classify-")
    for d in said["data"]:
        assert d["label"] == "good" and d["num_classes"] == 3
        assert sum(d["probs"]) == pytest.approx(1)
    size = made.link.submitted[0].num_prompt
    total = 1 + math.exp(size) + math.e
    assert said["data"][0]["probs"][1] == pytest.approx(math.exp(size) / total)


def test_a_conversation_is_judged_as_it_stands() -> None:
    """Red when a reward model is shown an invitation to go on."""
    made = bench(LABELS)
    made.link.pool = lambda ids: [0.0, 0.0, 1.0]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oh"}]
    said = made.post("/classify", {"messages": turns}).json()
    assert said["data"][0]["label"] == "odd"
    assert made.link.prompt() == "<s>user: hi|<s>assistant: oh|"


def test_plain_numbers() -> None:
    """`/pooling` gives the head's numbers, or an embedding where there is no head."""
    made = bench(LABELS)
    made.link.pool = lambda ids: [0.0, 3.0, 4.0]
    raw = made.post("/pooling", {"input": "a", "use_activation": False}).json()["data"][0]
    assert raw == {"index": 0, "object": "pooling", "data": [0.0, 3.0, 4.0]}
    embedded = made.post("/pooling", {"input": "a", "task": "embed"}).json()["data"][0]
    assert embedded["data"] == pytest.approx([0.0, 0.6, 0.8])
    assert made.link.submitted[-1].params.pooling == "mean"
    body = {"input": "a", "task": "embed", "encoding_format": "base64", "pooling": "last"}
    coded = made.post("/pooling", body).json()["data"][0]["data"]
    assert struct.unpack("<3f", base64.b64decode(coded)) == pytest.approx((0.0, 0.6, 0.8))
    assert bench().post("/pooling", {"input": "a"}).status_code == 200


@pytest.mark.parametrize(
    "verdict, path, body, words",
    [
        (None, "/classify", {"input": "a"}, "has no classification head"),
        (None, "/pooling", {"input": "a", "task": "classify"}, "has no classification head"),
        (None, "/pooling", {"input": "a", "task": "token_embed"}, "got task='token_embed'"),
        (None, "/pooling", {"input": "a", "dimensions": 9}, "want 1 to 8"),
        (None, "/pooling", {}, "want either input or messages"),
        (None, "/score", {"text_1": "a"}, "want text_1 and text_2"),
        (None, "/score", {"text_1": [], "text_2": "a"}, "got 0 and 1 texts"),
        (None, "/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "got 2 and 3 texts"),
        (None, "/score", {"text_1": "a", "text_2": "b", "pooling": "cls"}, "got pooling='cls'"),
        (None, "/rerank", {"query": "a", "documents": []}, "got 1 and 0 texts"),
        (None, "/rerank", {"query": "a", "documents": [{"txt": "b"}]}, "documents[0] without"),
        (None, "/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "got top_n=-1"),
        (LABELS, "/score", {"text_1": "a", "text_2": "b"}, "need a head of one label"),
        (LABELS, "/v1/completions", {"prompt": "a"}, "classifies and cannot generate"),
        (
            LABELS,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "classifies and cannot generate",
        ),
        (
            None,
            "/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens=0",
        ),
    ],
)
def test_what_cannot_be_asked(
    verdict: Verdict | None, path: str, body: dict[str, Any], words: str
) -> None:
    """Red when a request that makes no sense reaches the engine, or the reason is not told."""
    made = bench(verdict)
    reply = made.post(path, body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]
    assert made.link.submitted == []


def test_long_documents_are_cut_when_told_to() -> None:
    made = bench(ONE_LABEL)
    long = {"query": "q", "documents": ["x" * 20_000]}
    assert made.post("/rerank", long).json()["error"]["code"] == "context_length_exceeded"
    made.link.pool = lambda ids: [float(len(ids))]
    for most, want in ((5, 5), (-1, made.server.max_model_len - 1)):
        assert made.post("/rerank", {**long, "truncate_prompt_tokens": most}).status_code == 200
        assert made.link.submitted[-1].num_prompt == want


def test_lists_are_bounded() -> None:
    made = bench()
    most = made.server.limits.max_inputs
    reply = made.post("/score", {"text_1": "a", "text_2": ["b"] * most})
    assert reply.status_code == 400
    assert f"got {most + 1} inputs, want at most {most}" in reply.json()["error"]["message"]


def test_lists_are_counted_before_they_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a body of a million documents is encoded, on everybody's time, to be refused."""
    made = bench(ONE_LABEL)
    seen: list[str] = []
    monkeypatch.setattr("quire.server.score.encode_pair", lambda *texts: seen.append(texts[2]))
    reply = made.post("/rerank", {"query": "q", "documents": ["d"] * 2_049})
    assert reply.status_code == 400 and "want at most 2048" in reply.json()["error"]["message"]
    assert seen == []

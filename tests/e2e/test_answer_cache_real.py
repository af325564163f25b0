"""The cache of answers with a real engine: drafts change nothing, answers are the model's own."""

from __future__ import annotations

import json
import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.answers.held_out import HELD_OUT
from tests.answers.pairs import ADVERSARIAL, PARAPHRASES, SAME
from tests.e2e.harness import Served
from tests.tiny_folder import write_tiny_folder

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1_024)
    flags = ("--device", "cpu", "--load-format", "dummy", "--answer-cache", "answer")
    with Served(folder, *flags) as made:
        yield made


def ask(served: Served, text: str, mode: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """(the answer, how it came about)."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 24,
        "temperature": 0,
        "answer_cache": mode,
        "return_token_ids": True,
        **fields,
    }
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        head = answer.headers.get("x-quire-cache", "")
        return json.loads(answer.read()), head.split(";")[0]


def tokens(body: dict[str, Any]) -> list[int]:
    return list(body["choices"][0]["token_ids"])


def test_drafts_and_answers_are_the_models_own(served: Served) -> None:
    """Red when a cached answer changes a token of another request's answer."""
    for one, other in (*ADVERSARIAL[::4], *SAME):
        for fields in ({}, {"temperature": 0.8, "seed": 5}):
            plain = tokens(ask(served, other, "off", **fields)[0])
            ask(served, one, "draft", **fields)
            assert tokens(ask(served, other, "draft", **fields)[0]) == plain
            body, how = ask(served, other, "answer", **fields)
            assert tokens(body) == plain and how == "exact"  # `draft` has left it there
    for one, other in ADVERSARIAL[1::4]:
        plain = tokens(ask(served, other, "off")[0])
        ask(served, one, "answer")
        body, how = ask(served, other, "answer")
        assert tokens(body) == plain and how != "answer"


def test_a_hint_that_is_right_saves_steps(served: Served) -> None:
    """Red when hints do not reach the engine, or are not used there."""
    text = "Tell me a story about a lighthouse."
    fields = {"temperature": 0.9, "seed": 3, "max_tokens": 64, "ignore_eos": True}
    ask(served, text, "draft", **fields)
    again = {**fields, "stop": ["\x00"]}  # another key and the same tokens
    body, how = ask(served, text, "draft", **again)
    details = body["usage"]["completion_tokens_details"]
    assert how == "draft" and details["accepted_prediction_tokens"] > 30
    counts = served.counts()
    assert any(k.startswith("answer_cache_requests") and '"draft"' in k for k in counts)


def test_the_prefill_proves(served: Served) -> None:
    """Red when a proof is found where the model says something else, or missed where it does not.
    A blank more at the end of a question is another prompt."""
    text = "Say it again."
    first, _ = ask(served, text, "answer", max_tokens=1)
    for other in (f"{text} ", f"{text}  "):
        plain = tokens(ask(served, other, "off", max_tokens=1)[0])
        body, how = ask(served, other, "answer", max_tokens=1)
        assert tokens(body) == plain
        assert (how == "proved") == (plain == tokens(first)) or how == "exact"


@pytest.mark.skipif(not IS_LONG, reason="a thousand requests, twice: QUIRE_LONG_TESTS=1")
def test_a_thousand_paraphrases_change_no_token(served: Served) -> None:
    """Red when a draft changes a token: of the likeliest answer, or of one that is drawn."""
    outcomes: Counter[str] = Counter()
    for number, texts in enumerate(PARAPHRASES):
        fields = {"temperature": 0.7, "seed": number} if number % 2 else {}
        for text in texts:
            plain = tokens(ask(served, text, "off", **fields)[0])
            body, how = ask(served, text, "draft", **fields)
            assert tokens(body) == plain, (text, how)
            outcomes[how] += 1
    assert outcomes.total() == 1_000 and outcomes["draft"] > 500, outcomes


@pytest.mark.skipif(not IS_LONG, reason="needs a real model and minutes: QUIRE_LONG_TESTS=1")
def test_a_real_model_is_never_misquoted(default_model_path: Path) -> None:
    """Red when an answer of `answer` is not what the model itself says to the new question."""
    flags = ("--device", "cpu", "--threads", "1", "--answer-cache", "answer")
    given = 0
    with Served(default_model_path, *flags) as served:
        for one, other in (*ADVERSARIAL, *HELD_OUT, *SAME):
            ask(served, one, "answer")
            plain = tokens(ask(served, other, "off")[0])
            body, how = ask(served, other, "answer")
            assert how != "answer"  # no entry has the record that this needs
            assert tokens(body) == plain, (one, other, how)
            given += how == "proved"
    assert given > 0

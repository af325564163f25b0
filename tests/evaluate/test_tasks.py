"""Choices: what is read, how it becomes tokens, and the log-probabilities beside transformers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.errors import BadRequest
from quire.evaluate.tasks import (
    UNCONDITIONAL,
    Choice,
    Item,
    answer_logprobs,
    parse_tasks,
    read_items,
    score_task,
)
from quire.llm import LLM
from tests.evaluate.conftest import Tiny

OpenTiny = Callable[..., LLM]
ITEMS = [
    Item(f"the quick brown {word} jumps", (" over", " the lazy dog", " 42"), gold)
    for gold, word in enumerate(("fox", "dog", "café"))
]


def oracle_sum(model: Any, choice: Choice) -> float:
    ids = torch.tensor([choice.ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
    return sum(
        float(logprobs[at - 1, choice.ids[at]]) for at in range(choice.num_context, len(choice.ids))
    )


def test_beside_transformers(open_tiny: OpenTiny, tiny: Tiny) -> None:
    """Red when the context is counted, a token of the answer is not, or lengths are wrong."""
    llm = open_tiny(tiny)
    tokenizer = llm.get_tokenizer()
    asked = [Choice.of(tokenizer, item.context, c) for item in ITEMS for c in item.choices]
    sums = np.array([oracle_sum(tiny.oracle, choice) for choice in asked])
    np.testing.assert_allclose(answer_logprobs(llm, asked, ""), sums, atol=1e-4)
    by_item = sums.reshape(len(ITEMS), -1)
    lengths = np.array([len(" over") - 1, len(" the lazy dog") - 1, len(" 42") - 1])
    golds = np.array([item.gold for item in ITEMS])
    found = score_task(llm, ITEMS, "")
    assert found.accuracy.value == (by_item.argmax(1) == golds).mean()
    assert found.normalised.value == ((by_item / lengths).argmax(1) == golds).mean()
    rights = (by_item.argmax(1) == golds).astype(float)
    assert found.accuracy.error == pytest.approx(rights.std(ddof=1) / np.sqrt(3))


def test_answers_begin_where_tokens_differ(open_tiny: OpenTiny, tiny: Tiny) -> None:
    """Red when a token that lies across the border is left out, or the first token is scored."""
    tokenizer = open_tiny(tiny).get_tokenizer()
    choice = Choice.of(tokenizer, "the qui", "ck brown")
    before = tokenizer.encode("the qui")
    assert choice.ids[: choice.num_context] == tuple(before[: choice.num_context])
    assert choice.num_context <= len(before)
    assert choice.ids == tuple(tokenizer.encode("the quick brown"))
    assert Choice.of(tokenizer, "", "a").num_context == 1


def record(task: str, document: int, choice: int) -> dict[str, Any]:
    return {
        "task_name": task,
        "doc_id": document,
        "label": document % 2,
        "request": {"context": f"{task} {document}", "continuation": f" {choice}"},
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two compressed files one after the other, as the package's are joined."""
    path = tmp_path / "choices.jsonl.gz"
    parts = []
    for task in ("arc_easy", "piqa"):
        lines = [record(task, d, c) for d in range(10) for c in range(3)]
        lines += [record(task, UNCONDITIONAL + d, c) for d in range(10) for c in range(3)]
        parts.append(gzip.compress("".join(json.dumps(x) + "\n" for x in lines).encode()))
    path.write_bytes(b"".join(parts))
    return path


def test_items_are_spread_and_always_the_same(data: Path) -> None:
    """Red when questions without context slip in, or other questions are chosen."""
    found = read_items(data, "piqa", 5)
    assert found == [Item(f"piqa {d}", (" 0", " 1", " 2"), d % 2) for d in (0, 2, 4, 6, 8)]
    assert len(read_items(data, "arc-easy", 200)) == 10
    assert read_items(data, "piqa", 5) == found


def test_unknown_tasks() -> None:
    with pytest.raises(BadRequest, match=r"'arc'.*arc-easy,piqa"):
        parse_tasks("piqa,arc")

"""Questions with a choice of answers, each scored by how likely the model finds it.

An answer is right if its tokens' log-probability, as it is or divided by the answer's length in
characters, is the largest of its question's. The questions are a package's data (`CHOICES` in
`load/known_texts.py`); every model gets the same ones, evenly spread over a set.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from quire.errors import BadRequest
from quire.evaluate.score import log_softmax, output_of, pieces, read_prompts
from quire.evaluate.stats import Estimate, Floats, item_mean
from quire.llm import LLM
from quire.text.tokenizer import Tokenizer

# Our names, and those in the data.
TASKS = {"arc-easy": "arc_easy", "piqa": "piqa", "sciq": "sciq", "hellaswag": "hellaswag"}
UNCONDITIONAL = 1_000_000  # questions from here on repeat the others without their context


@dataclass(frozen=True, slots=True)
class Item:
    context: str
    choices: tuple[str, ...]  # with the space before them
    gold: int


@dataclass(frozen=True, slots=True)
class TaskScore:
    num_items: int
    accuracy: Estimate
    normalised: Estimate  # by characters of the answer


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer behind its question, as tokens."""

    ids: tuple[int, ...]
    num_context: int

    @staticmethod
    def of(tokenizer: Tokenizer, context: str, answer: str) -> Choice:
        whole, before = tokenizer.encode(context + answer), tokenizer.encode(context)
        # A token may lie across the border; it counts as the answer's.
        same = zip(whole, before, strict=False)
        num_same = next((i for i, (a, b) in enumerate(same) if a != b), len(before))
        return Choice(tuple(whole), max(1, min(num_same, len(whole) - 1)))


def parse_tasks(text: str) -> tuple[str, ...]:
    """
    >>> parse_tasks("piqa,sciq"), parse_tasks("none")
    (('piqa', 'sciq'), ())
    """
    if text == "all":
        return tuple(TASKS)
    names = () if text == "none" else tuple(text.split(","))
    for name in names:
        if name not in TASKS:
            raise BadRequest(f"got task {name!r}, want some of {','.join(TASKS)}; or all, or none")
    return names


def read_items(path: Path, task: str, count: int) -> list[Item]:
    """Up to `count` of a task's questions, evenly spread, always the same."""
    found = list(_items(path, TASKS[task]))
    count = min(count, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _items(path: Path, name: str) -> Iterator[Item]:
    mark, document = f'"task_name": "{name}"', -1
    held: list[Mapping[str, Any]] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if mark not in line:
                continue
            record = json.loads(line)
            if record["doc_id"] != document:
                if held:
                    yield _item(held)
                document, held = record["doc_id"], []
            if document < UNCONDITIONAL:
                held.append(record)
    if held:
        yield _item(held)


def _item(records: Sequence[Mapping[str, Any]]) -> Item:
    """The checksum of the data vouches for their form."""
    answers = tuple(str(record["request"]["continuation"]) for record in records)
    return Item(str(records[0]["request"]["context"]), answers, int(records[0]["label"]))


def score_task(llm: LLM, items: Sequence[Item], name: str) -> TaskScore:
    tokenizer = llm.get_tokenizer()
    asked = [Choice.of(tokenizer, item.context, c) for item in items for c in item.choices]
    sums = answer_logprobs(llm, asked, name)
    right, right_by_length, at = [], [], 0
    for item in items:
        own = sums[at : at + len(item.choices)]
        lengths = np.array([len(choice.strip()) for choice in item.choices])
        right.append(float(own.argmax() == item.gold))
        right_by_length.append(float((own / lengths).argmax() == item.gold))
        at += len(item.choices)
    return TaskScore(
        len(items), item_mean(np.asarray(right)), item_mean(np.asarray(right_by_length))
    )


def answer_logprobs(llm: LLM, asked: Sequence[Choice], name: str) -> Floats:
    """The log-probability of each answer's tokens, summed."""
    model = output_of(llm)
    found = [np.zeros(len(choice.ids) - 1) for choice in asked]

    def read(number: int, start: int, hidden: Tensor, targets: Tensor) -> None:
        skipped = max(0, asked[number].num_context - 1 - start)  # what predicts the context
        hidden, targets = hidden[skipped:], targets[skipped:]
        for part in pieces(len(hidden), model.spec.vocab_size):
            chosen = log_softmax(model.logits(hidden[part])).gather(1, targets[part][:, None])
            at = start + skipped + part.start
            found[number][at : at + len(chosen)] = chosen.squeeze(1).cpu().numpy()

    read_prompts(llm, [choice.ids for choice in asked], read, f"Scoring {name}")
    return np.array([values.sum() for values in found])

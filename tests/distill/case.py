"""Tiny targets and runs for the tests of distillation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.distill.loop import Job, Progress, distil
from quire.distill.recipe import Corpus, Recipe, Schedule, Shape
from quire.models.tiny import tiny_model

CPU = torch.device("cpu")
SHAPES = {
    "draft_model": Shape("draft_model", layers=1),
    "early_exit": Shape("early_exit", layers=1),
    "medusa": Shape("medusa", vocab=90, depth=2),
    "eagle3": Shape("eagle3", vocab=90, depth=2),
}


class Died(BaseException):
    """What ends a process ends it everywhere."""


def target(folder: Path, family: str = "llama", **changes: Any) -> Path:
    return tiny_model(family, folder / "target", num_hidden_layers=3, **changes)


def job(model: Path, out: Path, shape: Shape, **changes: Any) -> Job:
    """Few answers, few steps, a state every two of them."""
    schedule = Schedule(steps=6, batch=2, learning_rate=3e-3, warmup=2, save_every=2)
    corpus = Corpus(answers=9, tokens=12)
    if "answers" in changes:
        corpus = replace(corpus, answers=changes.pop("answers"))
    recipe = Recipe(str(model), shape, corpus, replace(schedule, **changes))
    return Job(recipe, out, CPU, 1)


def run(model: Path, out: Path, shape: Shape, **changes: Any) -> dict[str, Any]:
    return distil(job(model, out, shape, **changes), silent)


def silent(progress: Progress) -> None:
    pass


def dies_at(step: int) -> Any:
    """A listener that ends the process there."""

    def listen(progress: Progress) -> None:
        if progress.what == "steps" and progress.done == step:
            raise Died

    return listen

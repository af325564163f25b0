"""The distilling benchmark trains for as long as there is time, and no longer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_distil import ANSWERS, Clock, Lesson
from quire.distill.recipe import Recipe, Shape
from quire.models.tiny import tiny_model
from tests.distill.case import CPU, job, target


@pytest.fixture
def lesson(tmp_path: Path) -> Lesson:
    model = target(tmp_path)
    start = tiny_model("llama", tmp_path / "start", seed=5, num_hidden_layers=1)
    shape = Shape("student", start=str(start))
    recipe: Recipe = job(model, tmp_path / "out", shape, save_every=1 << 30, warmup=40).recipe
    lines = [json.dumps([[5, 6 + i], [40 + i, 7, 8]]) + "\n" for i in range(recipe.corpus.answers)]
    (tmp_path / ANSWERS).write_text("".join(lines))
    return Lesson(recipe, tmp_path, CPU, Clock())


class Ticking:
    """A second goes by whenever it is asked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def test_training_fills_its_time(lesson: Lesson) -> None:
    """Red when steps end long before the time does, or after it, or the rate does not fall with
    it."""
    lesson.clock = Clock(Ticking())
    report, run = lesson.learn(100.0)
    step, late = run.seconds_a_step(), run.end - run.marks[-1]
    assert report["schedule"]["steps"] == len(run.history) == len(run.marks) - 1 > 10
    assert late < 2 * step + 1 and run.marks[-1] <= run.end
    assert lesson.clock.seconds <= 100.0
    rates = [entry["rate"] for entry in report["history"]]
    top = rates.index(max(rates))
    assert 0 < top < len(rates) / 4 and rates[0] < rates[top]
    assert rates[top:] == sorted(rates[top:], reverse=True) and rates[-1] < 0.2 * rates[top]
    assert report["after"]["loss"] < report["before"]["loss"]
    assert (lesson.folder / "out" / "config.json").exists()


def test_with_no_time_left_a_step_is_made(lesson: Lesson) -> None:
    """Red when a late lesson fails, or goes on for as many steps as its schedule says."""
    report, _ = lesson.learn(0.0)
    assert report["schedule"]["steps"] == 1

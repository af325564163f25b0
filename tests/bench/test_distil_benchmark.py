"""The distilling benchmark counts its steps by a pilot, which must not teach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_distil import ANSWERS, PILOT_STEPS, Clock, Lesson, room_of
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


def test_the_pilot_moves_no_weight(lesson: Lesson) -> None:
    """Red when what is timed before the run is part of what the run learns."""
    room = room_of(lesson.recipe, lesson.folder / "out", lesson.folder / ANSWERS, CPU)
    before = {name: leaf.detach().clone() for name, leaf in room.pupil.leaves().items()}
    assert lesson.seconds_a_step(room) > 0
    for name, leaf in room.pupil.leaves().items():
        assert torch.equal(leaf, before[name]), name
    assert room.desk.load() is None


def test_steps_fill_the_time(lesson: Lesson, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a run's steps, warm-up or weights do not follow from how long a step takes."""
    monkeypatch.setattr(Lesson, "seconds_a_step", lambda self, room: 5.0)
    report, watch = lesson.learn(86.0)
    assert report["schedule"]["steps"] == len(watch.marks) > PILOT_STEPS
    assert len(watch.marks) in (15, 16)  # of 86 s, less what loading and writing take
    assert report["schedule"]["warmup"] == len(watch.marks) // 8
    assert report["after"]["loss"] < report["before"]["loss"]
    assert (lesson.folder / "out" / "config.json").exists()


def test_with_no_time_left_a_few_steps_are_made(lesson: Lesson) -> None:
    lesson.recipe = replace(lesson.recipe, schedule=replace(lesson.recipe.schedule, steps=99))
    report, _ = lesson.learn(0.0)
    assert report["schedule"]["steps"] == PILOT_STEPS

"""The loop: one for drafters and students alike.

The target answers prompts (`answers.py`), reads its answers (`teacher.py`), and the pupil learns
from them step by step. Everything that took time is on disk, so a run that was killed goes on, and
the bits are those of a run that was not. What learns is behind `pupil.py`.
"""

from __future__ import annotations

import json
import math
import operator
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quire.compress.output import Output
from quire.compress.safetensors_file import write_tensors
from quire.distill.answers import Answer, collect, prompts_of
from quire.distill.engines import engine_for, let_go
from quire.distill.lessons import Lesson, Lessons
from quire.distill.live_teacher import LiveTeacher
from quire.distill.losses import Judged
from quire.distill.optimiser import Optimiser
from quire.distill.own import OwnAnswers
from quire.distill.prompts import digest
from quire.distill.pupil import KINDS, Pupil
from quire.distill.recipe import Recipe
from quire.distill.state import Desk, State
from quire.distill.teacher import KeptTeacher, Target, Teacher
from quire.errors import NotSupported, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

REPORT = "distill.json"
WRITES = ("student", "draft_model")  # kinds that are whole models
STATES_LIMIT = 16 << 30  # bytes of hidden states that are kept on disk


@dataclass(frozen=True, slots=True)
class Job:
    recipe: Recipe
    out: Path
    device: torch.device
    threads: int | None = None
    draw: Callable[[Mapping[str, Any]], None] | None = None  # the report, at every checkpoint


@dataclass(frozen=True, slots=True)
class Progress:
    what: str  # "answers" or "steps"
    done: int
    total: int
    loss: float | None = None
    accepted: float | None = None  # drafts a step
    held_out: Mapping[str, float] | None = None  # at a checkpoint


Listen = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Room:
    """All that a pupil learns with: it is there before the first step, for as many as are asked."""

    job: Job
    desk: Desk
    pupil: Pupil
    teacher: Teacher
    answers: Sequence[Answer]


def distil(job: Job, listen: Listen) -> dict[str, Any]:
    """Trains the pupil, writes it and returns the report. Raises QuireError."""
    begun = time.perf_counter()
    room = prepare(job, listen)
    report = Run(room, listen).all() | {"seconds": time.perf_counter() - begun}
    finish(room, report)
    return report


def finish(room: Room, report: Mapping[str, Any]) -> None:
    """Writes the pupil as it is."""
    write(room.job.out, room.pupil, report)
    shutil.rmtree(room.desk.folder / "states", ignore_errors=True)


def prepare(job: Job, listen: Listen) -> Room:
    """Answers are written, or read where they are there; target and pupil are loaded."""
    KINDS.check(job.recipe.shape.kind)
    prompts = digest(prompts_of(job.recipe.corpus))
    desk = Desk.open(job.out, {**job.recipe.asked(), "prompts": prompts})
    answers = collect(
        desk.folder / "answers.jsonl",
        job.recipe.corpus,
        lambda: _engine(job, job.recipe.target),
        lambda done, total: listen(Progress("answers", done, total)),
    )
    let_go(job.device)
    target = Target.open(job.recipe.target, job.device, job.threads)
    if job.recipe.schedule.own_share and job.recipe.shape.kind not in WRITES:
        raise NotSupported(
            f"got --own-share {job.recipe.schedule.own_share} for a pupil of kind"
            f" {job.recipe.shape.kind!r}, which cannot write by itself; leave it out, or take"
            f" {' or '.join(WRITES)}"
        )
    pupil: Pupil = KINDS.get(job.recipe.shape.kind)(
        target, job.recipe.shape, job.recipe.schedule, answers
    )
    teacher = _teacher(job, target, pupil.taps, desk.folder / "states")
    return Room(job, desk, pupil, teacher, answers)


def _engine(job: Job, model: str) -> LLM:
    return engine_for(model, job.device, job.threads, job.recipe.corpus.seed)


def _teacher(job: Job, target: Target, taps: tuple[int, ...], folder: Path) -> Teacher:
    """Who reads every answer in every pass, where that is cheaper than a disk."""
    if job.device.type == "cpu":
        return KeptTeacher(target, taps, folder, STATES_LIMIT)
    return LiveTeacher(target, taps, job.recipe.shape.kind not in WRITES)


class Run:
    def __init__(self, room: Room, listen: Listen) -> None:
        job, desk, pupil, answers = room.job, room.desk, room.pupil, room.answers
        self.schedule, self.recipe, self.device = job.recipe.schedule, job.recipe, job.device
        self.desk, self.pupil, self.listen = desk, pupil, listen
        corpus, write_own = job.recipe.corpus, self._own_engine
        own = OwnAnswers(answers, corpus, self.schedule, desk.folder, write_own, job.device)
        self.lessons = Lessons(answers, own, room.teacher, self.schedule.batch, self.schedule.seed)
        self.job = job
        self.optimiser = Optimiser(pupil.leaves(), self.schedule)
        self.history: list[dict[str, Any]] = []

    def all(self) -> dict[str, Any]:
        if (state := self.desk.load()) is not None:
            self.optimiser.restore(state.tensors)
            self.history = state.history
        resumed_at = len(self.history)
        first = self.judge_held_out() if not self.history else self.history[0]["before"]
        for number in range(len(self.history), self.schedule.steps):
            entry = self._step(number)
            if number == 0:
                entry["before"] = first
            self.history.append(entry)
            is_last = number + 1 == self.schedule.steps
            if is_last or (number + 1) % self.schedule.save_every == 0:
                entry["held_out"] = self.judge_held_out()
                self.desk.save(State(self.optimiser.tensors(), self.history))
                self._draw()
            self._tell(entry)
        return self._report() | {"resumed_at": resumed_at}

    def _report(self) -> dict[str, Any]:
        return {
            **self.recipe.asked(),
            "trained_values": sum(leaf.numel() for leaf in self.pupil.leaves().values()),
            "before": self.history[0]["before"],
            "after": self.history[-1]["held_out"],
            "history": self.history,
        }

    def _draw(self) -> None:
        if self.job.draw is not None:
            self.job.draw(self._report())

    def _own_engine(self, folder: Path) -> LLM:
        folder.mkdir()
        write(folder, self.pupil, {})
        return _engine(self.job, str(folder))

    def judge_held_out(self) -> dict[str, float]:
        """The mean loss and accepted drafts on answers that nobody learns from."""
        with torch.no_grad():
            found = [self._judge(lesson) for lesson in self.lessons.held_out()]
        rows = sum(judged.num_rows for judged in found)
        loss = sum(float(judged.loss) * judged.num_rows for judged in found) / rows
        survived = torch.stack([judged.survived for judged in found]).sum(0) / rows
        made = {"loss": loss, "accepted": float(survived.sum()), "rows": float(rows)}
        return made | {f"accepted_{i + 1}": float(share) for i, share in enumerate(survived)}

    def _step(self, number: int) -> dict[str, Any]:
        told, rows = list[Tensor](), 0
        first = number * self.schedule.accumulate
        micro_steps = range(first, first + self.schedule.accumulate)
        counts = [self.lessons.num_tokens(micro) for micro in micro_steps]
        shares = [count / sum(counts) for count in counts]  # as in one batch of all
        for micro, share in zip(micro_steps, shares, strict=True):
            judged = self._judge(self.lessons.of_step(micro))
            (judged.loss * share).backward()
            told += [judged.loss.detach(), judged.survived.sum()]
            rows += judged.num_rows
        told.append(self.optimiser.clip())
        # The only wait for the device in a step: numbers are asked for once, all together.
        *found, norm = torch.stack([value.double() for value in told]).tolist()
        losses, survived = found[::2], found[1::2]
        for value in losses:
            self._check(value, number, "loss")
        self._check(norm, number, "gradient")
        self.optimiser.step(number)
        return {
            "step": number + 1,
            "loss": sum(map(operator.mul, losses, shares)),
            "accepted": sum(survived) / max(1, rows),
            "rate": self.optimiser.rate(number),
            "norm": norm,
        }

    def _judge(self, lesson: Lesson) -> Judged:
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            return self.pupil.judge(lesson)

    def _check(self, value: float, number: int, what: str) -> None:
        if not math.isfinite(value):
            kept = number // self.schedule.save_every * self.schedule.save_every
            raise QuireError(
                f"the {what} is {value} in step {number + 1}; the state of step {kept} is kept."
                f" Begin anew in another folder with a --learning-rate below"
                f" {self.schedule.learning_rate:g} or a longer --warmup"
            )

    def _tell(self, entry: Mapping[str, Any]) -> None:
        self.listen(
            Progress(
                "steps",
                entry["step"],
                self.schedule.steps,
                entry["loss"],
                entry["accepted"],
                entry.get("held_out"),
            )
        )


def write(out: Path, pupil: Pupil, report: Mapping[str, Any]) -> None:
    """The pupil's files, its config last: without one no reader takes the folder for a model."""
    output, written = Output(out, 0), pupil.written()
    with output.writing(out / "model.safetensors") as file:
        write_tensors(file, written.tensors)
    for name, data in written.files.items():
        output.write(name, data)
    output.write(REPORT, json.dumps(report, indent=1).encode() + b"\n")
    output.write("config.json", json.dumps(dict(written.config), indent=1).encode() + b"\n")

"""Perplexity that distilling gives back to a model without a quarter of its layers.

    python -m benchmarks.gpu_distil --text sotu-newest.txt --parts FOLDER --minutes 5
    python -m benchmarks.gpu_distil --text FILE --model MODEL --layers 2 --device cpu --minutes 1

The model is shrunk by depth, writes answers for `--answer-share` of the time, and all that is left
of `--minutes` goes to training: its learning rate falls with the clock, not with a count of steps,
and it ends where the next step would be late. The rest is `quire shrink`'s and `quire distill`'s
own doing. Then the original, the shrunk and the distilled model read one text, on a GPU with plain
weights and no graphs, which prompts do not use. Prints a JSON line of what was learned, then one of
everything, should the time end between them. `--parts` joins the files of a folder, in the order of
their names.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from quire.compress.calibration import Calibration
from quire.compress.passes.recipe import Recipe as Shrinking
from quire.compress.pipeline import Job as ShrinkJob
from quire.compress.pipeline import compress
from quire.distill.answers import Answer, collect, prompts_of
from quire.distill.engines import engine_for, let_go
from quire.distill.loop import Job, Progress, Room, Run, finish, prepare
from quire.distill.optimiser import FLOOR, Optimiser
from quire.distill.prompts import digest
from quire.distill.recipe import Corpus, Recipe, Schedule, Shape
from quire.distill.state import Desk
from quire.evaluate.arms import Arm
from quire.evaluate.report import report as reported
from quire.evaluate.run import Work
from quire.evaluate.run import run as evaluated
from quire.evaluate.texts import HeldOut
from quire.runner.device import pick_device

ANSWERS = "answers.jsonl"
MOST = 1 << 20  # answers; the time is over long before
WRITING_S = 3.0  # for the weights at the end
WARMUP_SHARE = 1 / 8  # of the time, at most
RECENT = 5  # steps that tell how long the next one takes
SHRINK_TEXT = Calibration(16, 512)  # layers are ranked by how they turn the stream: that is plenty


class TimeIsUp(Exception):
    pass


class Clock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.begun = now, now()
        self.phases = dict[str, float]()

    @property
    def seconds(self) -> float:
        return self.now() - self.begun

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = self.seconds
        yield
        self.phases[name] = round(self.seconds - begun, 1)
        print(f"{name}: {self.phases[name]} s", file=sys.stderr, flush=True)


def joined(parts: Path, folder: Path) -> str:
    """One GGUF file of the pieces that it was cut into."""
    pieces = sorted(path for path in parts.iterdir() if path.is_file())
    whole = folder / "original.gguf"
    with whole.open("wb") as file:
        for piece in pieces:
            with piece.open("rb") as read:
                shutil.copyfileobj(read, file)
    if whole.stat().st_size == 0:
        raise SystemExit(f"{parts} has no files to join")
    return str(whole)


def shrink(model: str, layers: int, folder: Path, device: torch.device) -> dict[str, Any]:
    recipe = Shrinking(method="shrink", layers=layers)
    return compress(
        ShrinkJob(model, folder, recipe, SHRINK_TEXT, (), device), lambda progress: None
    )


@dataclass
class Answering:
    """Answers until the time is up, in rounds; the last round is what is waited for."""

    path: Path
    corpus: Corpus
    seconds: float
    marks: list[tuple[int, float]] = field(default_factory=list)

    def collect(self, model: str, device: torch.device) -> list[Answer]:
        def make() -> Any:
            return engine_for(model, device, None, self.corpus.seed)

        self.begun = time.monotonic()
        try:
            return collect(self.path, replace(self.corpus, answers=MOST), make, self._listen)
        except TimeIsUp:
            pass  # the file is whole up to the last round, and nothing is asked for again
        let_go(device)
        count = len(self.path.read_bytes().splitlines())
        return collect(self.path, replace(self.corpus, answers=count), make, lambda *said: None)

    def _listen(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.marks.append((done, now))
        last_round = now - self.marks[-2][1] if len(self.marks) > 2 else 0.0
        if done and now - self.begun + last_round > self.seconds:
            raise TimeIsUp

    def tokens_per_second(self, answers: list[Answer]) -> float:
        """Without the first round, in which kernels are compiled, where there were more."""
        first = 1 if len(self.marks) > 2 else 0
        (low, begun), (high, ended) = self.marks[first], self.marks[-1]
        return sum(len(answer.answer) for answer in answers[low:high]) / max(1e-9, ended - begun)


class ByTheClock(Optimiser):
    """Up over the warm-up's steps, or an eighth of the time if that is sooner; then down along a
    cosine until the time is up."""

    def __init__(self, leaves: Any, schedule: Schedule, gone: Callable[[], float]) -> None:
        super().__init__(leaves, schedule)
        self.gone = gone  # share of the time

    def rate(self, step: int) -> float:
        gone = min(1.0, self.gone())
        up = min(1.0, max((step + 1) / max(1, self.schedule.warmup), gone / WARMUP_SHARE))
        down = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * gone))
        return self.schedule.learning_rate * up * down


class TimedRun(Run):
    """As many steps as fit before the clock shows `end`, the last judgement too."""

    def __init__(self, room: Room, clock: Clock, end: float) -> None:
        super().__init__(room, tell)
        self.clock, self.end, self.marks = clock, end, list[float]()
        self.optimiser = ByTheClock(room.pupil.leaves(), self.schedule, self._gone)

    def all(self) -> dict[str, Any]:
        begun = self.clock.seconds
        before = self.judge_held_out()
        self.marks = [self.clock.seconds]
        self.end -= self.marks[0] - begun  # it is done again behind the last step
        while not self.history or self._has_time():
            self.history.append(self._step(len(self.history)))
            self.marks.append(self.clock.seconds)
            self._tell(self.history[-1])
        self.history[0]["before"], self.history[-1]["held_out"] = before, self.judge_held_out()
        report = self._report()
        return {**report, "schedule": {**report["schedule"], "steps": len(self.history)}}

    def _gone(self) -> float:
        begun = self.marks[0]
        return (self.clock.seconds - begun) / max(1e-9, self.end - begun)

    def _has_time(self) -> bool:
        return self.clock.seconds + self.seconds_a_step() <= self.end

    def seconds_a_step(self) -> float:
        """The median of the newest: the first ones allocate and choose kernels."""
        marks = self.marks[-RECENT - 1 :]
        each = sorted(after - before for before, after in pairwise(marks))
        return each[len(each) // 2]


def tell(progress: Progress) -> None:
    if progress.what == "steps" and progress.done % 100 == 0:
        print(f"step {progress.done}: loss {progress.loss:.4f}", file=sys.stderr, flush=True)


def room_of(recipe: Recipe, out: Path, answers: Path, device: torch.device) -> Room:
    """As `quire distill` finds it that goes on with answers that are there."""
    prompts = digest(prompts_of(recipe.corpus))
    desk = Desk.open(out, {**recipe.asked(), "prompts": prompts})
    shutil.copy(answers, desk.folder / ANSWERS)
    return prepare(Job(recipe, out, device), lambda progress: None)


def judge(original: str, arms: dict[str, Path], text: Path, args: argparse.Namespace) -> Any:
    options: dict[str, Any] = {"device": args.device}
    if pick_device(args.device)[0].type == "cuda":
        options |= {"dtype": "bfloat16", "enforce_eager": True}
    work = Work(HeldOut.file(text), args.window, args.eval_tokens, {}, options)
    found = [Arm(name, str(folder)) for name, folder in arms.items()]
    outcomes = evaluated(found, Arm("original", original), work, lambda said: None)
    return reported(outcomes, work)["rows"]


def perplexities(rows: list[dict[str, Any]]) -> dict[str, Any]:
    of = {row["name"]: row["perplexity"]["value"] for row in rows}
    lost, left = of["shrunk"] - of["original"], of["distilled"] - of["original"]
    return {
        "perplexity": of,
        "recovered": round(1 - left / lost, 4),
        "perplexity_by_context": {row["name"]: row["perplexity_by_context"] for row in rows},
        "kl": {row["name"]: row["against"]["kl_mean"]["value"] for row in rows if "against" in row},
        "eval_tokens": rows[0]["tokens"],
    }


@dataclass
class Lesson:
    """A model that learns from answers, for as long as there is time."""

    recipe: Recipe
    folder: Path
    device: torch.device
    clock: Clock

    def learn(self, seconds: float) -> tuple[Any, TimedRun]:
        end, out = self.clock.seconds + seconds - WRITING_S, self.folder / "out"
        with self.clock.phase("loading"):
            room = room_of(self.recipe, out, self.folder / ANSWERS, self.device)
        with self.clock.phase("training"):
            run = TimedRun(room, self.clock, end)
            report = run.all()
        with self.clock.phase("writing"):
            finish(room, report)
        return report, run


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device, clock = pick_device(args.device)[0], Clock()
    with clock.phase("model"):
        model = joined(args.parts, folder) if args.parts else args.model
    with clock.phase("shrink"):
        shrunk = shrink(model, args.layers, folder / "shrunk", device)
    begun, limit = clock.seconds, args.minutes * 60
    corpus = Corpus(MOST, args.tokens, (1.0,), free_share=args.free_share)
    asking = Answering(folder / ANSWERS, corpus, args.answer_share * limit)
    with clock.phase("answers"):
        answers = asking.collect(model, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    recipe = Recipe(
        model,
        Shape("student", start=str(folder / "shrunk")),
        replace(corpus, answers=len(answers)),
        schedule_of(args),
    )
    lesson = Lesson(recipe, folder, device, clock)
    report, run = lesson.learn(limit - (clock.seconds - begun))
    distilled_s = clock.seconds - begun
    let_go(device)
    trained = figures(answers, asking, run, report)
    print(json.dumps({"what": "learned", **trained, "phases_s": clock.phases}), flush=True)
    with clock.phase("evaluation"):
        arms = {"shrunk": folder / "shrunk", "distilled": folder / "out"}
        rows = judge(model, arms, args.text, args)
    return {
        "what": "distil",
        **perplexities(rows),
        "layers": [shrunk["sizes_before"]["layers"], shrunk["sizes"]["layers"]],
        "kept_layers": shrunk["kept_layers"],
        "distilling_s": round(distilled_s, 1),
        "phases_s": clock.phases,
        **trained,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
    }


def schedule_of(args: argparse.Namespace) -> Schedule:
    return Schedule(
        batch=args.batch,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        hidden_loss=args.hidden_loss,
        own_share=args.own_share,
    )


def figures(answers: list[Answer], asking: Answering, run: TimedRun, report: Any) -> dict[str, Any]:
    marks = run.marks[min(RECENT, len(run.marks) - 2) :]  # the first steps choose kernels
    step_s = (marks[-1] - marks[0]) / (len(marks) - 1)
    mean = sum(len(answer.ids) for answer in answers) / len(answers)
    history, schedule = report["history"], report["schedule"]
    every = max(1, len(history) // 20)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "answers": len(answers),
        "tokens_an_answer": round(mean, 1),
        "answer_tokens_per_s": round(asking.tokens_per_second(answers)),
        "steps": schedule["steps"],
        "batch": schedule["batch"],
        "learning_rate": schedule["learning_rate"],
        "step_ms": round(1e3 * step_s, 2),
        "training_tokens_per_s": round(mean * schedule["batch"] / step_s),
        "passes": round(schedule["steps"] * schedule["batch"] / len(answers), 2),
        "peak_memory_gb": round(peak / 1e9, 1),
        "held_out": {"before": report["before"]["loss"], "after": report["after"]["loss"]},
        "loss": [round(entry["loss"], 4) for entry in history[::every]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="default")
    parser.add_argument("--parts", type=Path, help="a folder with the pieces of a GGUF file")
    parser.add_argument("--text", type=Path, required=True, help="held out, UTF-8")
    parser.add_argument("--minutes", type=float, default=5.0, help="of distilling, answers too")
    parser.add_argument("--layers", type=int, default=22, help="that stay")
    parser.add_argument("--answer-share", type=float, default=0.3, help="of the time")
    parser.add_argument("--tokens", type=int, default=1023, help="of an answer")
    parser.add_argument("--free-share", type=float, default=0.85)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--hidden-loss", type=float, default=0.0)
    parser.add_argument("--own-share", type=float, default=0.0, help="from the second pass on")
    parser.add_argument("--window", type=int, default=1024, help="of the held-out text")
    parser.add_argument("--eval-tokens", type=int, default=1 << 16)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if not 0 < args.minutes <= 10:
        parser.error(f"got --minutes {args.minutes:g}, want at most 10")
    if not args.text.is_file():
        parser.error(f"got --text {args.text}, which is no file; `quire evaluate` fetches one")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args, Path(folder))), flush=True)


if __name__ == "__main__":
    main()

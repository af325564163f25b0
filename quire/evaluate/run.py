"""run: every arm loaded, measured, scored and let go of, one after the other.

The first model is the reference if there is one to compare with. Only one model is in memory at a
time, and the reference's head.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.errors import BadRequest, NotSupported
from quire.evaluate.arms import Arm
from quire.evaluate.compare import Reference, TokenScores, score_windows
from quire.evaluate.footprint import Footprint, MemoryWatch, footprint
from quire.evaluate.tasks import Item, TaskScore, score_task
from quire.evaluate.texts import HeldOut, Windows, cut
from quire.llm import LLM
from quire.load.hub import resolve_model
from quire.load.known_texts import check_not_calibrated
from quire.runner.device import pick_device

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Work:
    """What every arm is asked."""

    text: HeldOut
    window: int  # tokens
    num_tokens: int
    tasks: dict[str, list[Item]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of `LLM`, for all arms


@dataclass(frozen=True, slots=True)
class Outcome:
    arm: Arm
    windows: Windows
    tokens: TokenScores
    tasks: dict[str, TaskScore]
    cost: Footprint
    is_reference: bool = False


def run(arms: Sequence[Arm], against: Arm | None, work: Work, say: Say) -> list[Outcome]:
    """The reference's outcome comes first."""
    for arm in (*arms, *([against] if against else [])):
        _check_text(arm, work.text)
    if (count := _num_ranks(work.options)) > 1:
        say(f"bytes of memory are those of the first of {count} ranks")
    found: list[Outcome] = []
    reference: Reference | None = None
    if against is not None:
        say(f"{against.name}, the reference")
        outcome, reference = _run_reference(against, work)
        found.append(outcome)
    for arm in arms:
        if arm != against:
            say(arm.name)
            found.append(_run_arm(arm, work, reference))
    return found


def _num_ranks(options: dict[str, Any]) -> int:
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    return math.prod(int(options.get(size) or 1) for size in sizes)


def _run_reference(arm: Arm, work: Work) -> tuple[Outcome, Reference]:
    llm, cost = _load(arm, work)
    windows = _windows(llm, work)
    reference = Reference(llm, windows)
    tokens = score_windows(llm, windows, keep=reference)
    tasks = _tasks(llm, work)
    reference.release_layers()
    return Outcome(arm, windows, tokens, tasks, cost, is_reference=True), reference


def _run_arm(arm: Arm, work: Work, reference: Reference | None) -> Outcome:
    llm, cost = _load(arm, work)
    windows = _windows(llm, work)
    tokens = score_windows(llm, windows, reference)
    return Outcome(arm, windows, tokens, _tasks(llm, work), cost)


def _load(arm: Arm, work: Work) -> tuple[LLM, Footprint]:
    gc.collect()  # the model before
    device, _ = pick_device(str(work.options.get("device", "auto")))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    watch = MemoryWatch(device)
    options = {"max_model_len": work.window + 1} | work.options | arm.options
    try:
        llm = LLM(arm.model, **options)
    except NotSupported as error:
        if "got max_model_len" not in str(error):
            raise
        raise BadRequest(
            f"a window of {work.window} tokens does not fit: {error}; give a smaller --window"
        ) from error
    return llm, footprint(llm, watch)


def _windows(llm: LLM, work: Work) -> Windows:
    return cut(work.text, llm.get_tokenizer(), work.window, work.num_tokens)


def _tasks(llm: LLM, work: Work) -> dict[str, TaskScore]:
    return {name: score_task(llm, items, name) for name, items in work.tasks.items()}


def _check_text(arm: Arm, text: HeldOut) -> None:
    path = resolve_model(arm.model)
    if path.is_dir():
        check_not_calibrated(path, text.name, text.sha256)

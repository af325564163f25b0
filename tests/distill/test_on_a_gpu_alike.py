"""What a GPU does otherwise - a teacher that keeps nothing, free text - against what a CPU does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.config import EngineArgs
from quire.distill import loop, losses
from quire.distill.answers import Answer
from quire.distill.free_text import FreeText
from quire.distill.live_teacher import LiveTeacher
from quire.distill.loop import distil
from quire.distill.losses import divergence, divergence_from
from quire.distill.recipe import Corpus
from quire.distill.teacher import KeptTeacher, Target
from quire.errors import BadRequest
from quire.load.open import open_model
from tests.distill.case import CPU, SHAPES, job, run, silent, target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("distill"))


@pytest.mark.parametrize("wants_best", [True, False])
def test_a_live_teacher_says_what_a_kept_one_says(
    wants_best: bool, model: Path, tmp_path: Path
) -> None:
    """Red when sequences of a batch see each other, or their padding."""
    opened = Target.open(str(model), CPU, 1)
    named = {"a": [5, 6, 7, 8, 9, 10], "b": [40, 41], "c": [7] * 6}
    kept = KeptTeacher(opened, (1, 3), tmp_path / "states", 1 << 20).read(named)
    live = LiveTeacher(opened, (1, 3), wants_best).read(named)
    for row, ids in enumerate(named.values()):
        for one, other in zip(kept[:2], live[:2], strict=True):
            assert (one[row, : len(ids)] - other[row, : len(ids)]).abs().max() < 0.02  # of bf16
        if wants_best:
            assert torch.equal(kept.best[row, : len(ids)], live.best[row, : len(ids)])


@pytest.mark.parametrize("kind", SHAPES)
def test_pupils_learn_the_same_from_a_live_teacher(
    kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a kind of pupil reads what only a kept teacher gives it."""
    shape = SHAPES[kind]
    kept = run(model, tmp_path / "kept", shape)
    monkeypatch.setattr(
        loop,
        "_teacher",
        lambda job, target, taps, folder: LiveTeacher(target, taps, kind not in loop.WRITES),
    )
    live = run(model, tmp_path / "live", shape)
    assert live["after"]["loss"] == pytest.approx(kept["after"]["loss"], rel=0.05, abs=1e-4)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_the_gradient_in_closed_form(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when pieces are weighed otherwise, or the gradient is of another loss."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 11, generator=generator)
    teacher = torch.randn(7, 11, generator=generator)
    monkeypatch.setattr(losses, "VALUES_AT_ONCE", rows_at_once * 11)

    def judged(logits: Tensor) -> Tensor:
        return divergence_from(logits, lambda some: teacher[some]).loss

    one, other = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    loss, wanted = judged(one), divergence(other, teacher)
    (3.0 * loss).backward()
    (3.0 * wanted).backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad)
    agrees = divergence_from(rows, lambda some: teacher[some]).agrees
    assert torch.equal(agrees, rows.argmax(-1) == teacher.argmax(-1))


def test_no_rows_have_no_loss() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    apart = divergence_from(logits, lambda some: torch.zeros(0, 5))
    apart.loss.backward()
    assert apart.loss.item() == 0.0 and len(apart.agrees) == 0


def test_free_text_begins_anywhere_and_fills_its_length(model: Path, tmp_path: Path) -> None:
    """Red when free answers end early, all begin alike, or are others after a kill."""
    made = job(model, tmp_path / "out", SHAPES["draft_model"])
    tokenizer = open_model(EngineArgs(model=str(model))).tokenizer
    assert tokenizer is not None
    free = FreeText.of(tokenizer, Corpus(free_share=0.5))
    assert [free.has(number) for number in range(6)] == [False, True] * 3
    begun = [free.begin(number) for number in range(200)]
    assert begun == [free.begin(number) for number in range(200)]
    assert len({tuple(ids) for ids in begun}) > 50
    assert not set(tokenizer.eos_ids) & {ids[-1] for ids in begun}
    corpus = Corpus(answers=9, tokens=12, free_share=1.0)
    distil(replace(made, recipe=replace(made.recipe, corpus=corpus)), silent)
    lines = (tmp_path / "out" / "work" / "answers.jsonl").read_text().splitlines()
    answers = [Answer(*json.loads(line)) for line in lines]
    assert {len(answer.answer) for answer in answers} == {12}
    assert len({answer.prompt[-1] for answer in answers}) > 4


def test_a_share_is_a_share() -> None:
    with pytest.raises(BadRequest, match=r"got --free-share 1\.5"):
        Corpus(free_share=1.5)

"""Pupils learn on a GPU what they learn on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.distill.loop import distil
from quire.distill.recipe import Shape
from quire.models.tiny import tiny_model
from tests.distill.case import SHAPES, job, run, silent, target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    widths = {"hidden_size": 128, "intermediate_size": 192}
    return target(tmp_path_factory.mktemp("distill"), **widths)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_loss_falls(kind: str, model: Path, tmp_path: Path) -> None:
    """Red when a kind of pupil meets tensors of two devices or dtypes, or learns nothing."""
    made = job(model, tmp_path / "out", SHAPES[kind], steps=60, save_every=60, answers=60)
    report = distil(replace(made, device=CUDA), silent)
    assert report["after"]["loss"] < 0.97 * report["before"]["loss"]  # on a CPU 0.72 to 0.94


def test_a_student_learns_as_on_a_cpu(model: Path, tmp_path: Path) -> None:
    """Red when bf16 products, a live teacher or an engine between steps change what is learned."""
    widths = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1}
    start = tiny_model("llama", tmp_path / "start", seed=5, **widths)
    shape = Shape("student", start=str(start))
    changes = {"steps": 12, "own_share": 0.5, "hidden_loss": 0.5}
    on_cpu = run(model, tmp_path / "cpu", shape, **changes)
    on_gpu = distil(replace(job(model, tmp_path / "gpu", shape, **changes), device=CUDA), silent)
    for when in ("before", "after"):
        assert on_gpu[when]["loss"] == pytest.approx(on_cpu[when]["loss"], rel=0.2)


def test_a_perfect_pupil_is_seen_as_one(model: Path, tmp_path: Path) -> None:
    shape = Shape("student", start=str(model))
    made = job(model, tmp_path / "out", shape, learning_rate=1e-9, answers=60)
    report = distil(replace(made, device=CUDA), silent)
    assert report["after"]["loss"] < 5e-3 and report["after"]["accepted_1"] > 0.85

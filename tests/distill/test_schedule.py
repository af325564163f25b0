"""Steps of a run: how fast it learns in each, and what a step of several batches is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.distill.answers import prompts_of
from quire.distill.loop import distil
from quire.distill.optimiser import Optimiser
from quire.distill.prompts import digest
from quire.distill.recipe import Schedule
from quire.distill.state import Desk
from quire.load.safetensors_checkpoint import Shard
from tests.distill.case import SHAPES, job, silent, target

LENGTHS = (3, 40, 7, 21, 2, 30, 11, 16, 5)  # of answers: no two batches have as many tokens


def test_warm_up_and_cosine() -> None:
    """Red when the rate starts at nothing, jumps behind the warm-up, or ends elsewhere."""
    schedule = Schedule(steps=110, warmup=10, learning_rate=1e-3)
    rate = Optimiser({"w": torch.zeros(2, requires_grad=True)}, schedule).rate
    want = {0: 1e-4, 4: 5e-4, 9: 1e-3, 10: 1e-3, 60: 5.25e-4, 110: 5e-5, 200: 5e-5}
    assert {step: pytest.approx(rate(step)) for step in want} == want
    assert rate(35) == pytest.approx(1e-3 * (0.05 + 0.95 * (2 + 2**0.5) / 4))
    at_once = Optimiser({"w": torch.zeros(2, requires_grad=True)}, Schedule(steps=4, warmup=0))
    assert at_once.rate(0) == pytest.approx(3e-4)


def test_several_batches_are_one_larger(tmp_path: Path) -> None:
    """Red when batches of a step count alike though they have more tokens or fewer, or their
    gradients are not added."""
    model, found = target(tmp_path), {}
    for batch, accumulate in ((4, 1), (2, 2), (1, 4)):
        changes = {"batch": batch, "accumulate": accumulate, "steps": 4, "clip": 1e9}
        asked = job(model, tmp_path / f"out-{batch}", SHAPES["draft_model"], **changes)
        prompts = digest(prompts_of(asked.recipe.corpus))
        desk = Desk.open(asked.out, {**asked.recipe.asked(), "prompts": prompts})
        lines = [
            json.dumps([[5, 6], [40 + (i + j) % 60 for j in range(n)]]) + "\n"
            for i, n in enumerate(LENGTHS)
        ]
        (desk.folder / "answers.jsonl").write_text("".join(lines))
        report = distil(asked, silent)
        shard = Shard(asked.out / "model.safetensors")
        weights = torch.cat([shard.read(name).flatten() for name in sorted(shard.entries)])
        found[batch] = ([entry["loss"] for entry in report["history"]], weights)
    losses, weights = found[4]
    for other_losses, other_weights in (found[2], found[1]):
        assert other_losses == pytest.approx(losses, rel=1e-4)
        assert (other_weights - weights).abs().max() < 0.05 * 3e-3  # of a step

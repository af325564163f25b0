"""Products that eight bits of weights and inputs would cost too much keep their floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.compress.block import BlockTensors, Matrix
from quire.compress.passes import smoothquant
from quire.compress.passes.recipe import Recipe
from quire.compress.passes.smoothquant import SmoothQuant
from quire.compress.pipeline import compress
from quire.compress.seen import Needs, Seen
from quire.config import EngineArgs
from quire.load.open import open_model
from tests.compress.models import CPU, job, run, small

NUM_IN = 512


def seen_of(rows: torch.Tensor) -> Seen:
    seen = Seen(NUM_IN, Needs(rows=True), len(rows), CPU)
    seen.add(rows)
    return seen


def test_rows_with_a_spike_of_their_own_are_spared() -> None:
    """Red when what is lost is not measured: no scale of a channel helps where each row has its
    outlier in another one."""
    draw = torch.Generator().manual_seed(0)
    spiky = torch.randn(64, NUM_IN, generator=draw)
    even = spiky.clone()
    spiky[torch.arange(64), torch.randperm(NUM_IN, generator=draw)[:64]] = 60.0
    sites = {"up": even, "down": spiky, "experts.0.down": spiky}
    matrices = [Matrix(f"{site}.weight", site, {}) for site in sites]
    tensors = {m.name: torch.randn(32, NUM_IN, generator=draw) for m in matrices}
    block = BlockTensors("", tensors, {}, matrices)
    work = SmoothQuant(Recipe("smoothquant"), torch.bfloat16)
    found = work.spared(matrices, block, {site: seen_of(rows) for site, rows in sites.items()})
    assert found.keys() == {"down"} and found["down"] > smoothquant.MOST_LOST
    # Nothing was heard, so nothing is known.
    assert work.spared(matrices, block, {"down": seen_of(spiky[:0])}) == {}


def errors_of(report: dict[str, Any]) -> dict[str, float]:
    return {name: verdict["error"] for name, verdict in report["projections"].items()}


def test_what_is_spared_is_plain_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when readers are not told, the report is silent, or a resumed run forgets it."""
    model, out = small(tmp_path), tmp_path / "out"
    whole: Any = run(model, tmp_path / "whole", "smoothquant")
    assert len(whole["projections"]) == 14 and not any(
        "stay as they" in r for r in whole["remarks"]
    )

    lost = SmoothQuant.lost
    down_at = 96  # inputs of down_proj alone
    monkeypatch.setattr(
        SmoothQuant, "lost",
        lambda self, rows, weight: 1.0 if rows.shape[1] == down_at else lost(self, rows, weight),
    )  # fmt: skip

    class Died(Exception):
        pass

    def die(progress: Any) -> None:
        if progress.done == 1:
            raise Died

    with pytest.raises(Died):
        compress(job(model, out, "smoothquant"), die)
    report: Any = run(model, out, "smoothquant")
    downs = {f"model.layers.{layer}.mlp.down_proj" for layer in range(2)}
    assert downs < set(report["kept"]) and downs.isdisjoint(errors_of(report))
    assert any("2 projections stay as they are" in remark for remark in report["remarks"])
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert downs < set(said["ignore"])
    stored = open_model(EngineArgs(model=str(out))).checkpoint
    assert all(f"{name}.weight_scale" not in stored.names() for name in downs)
    assert "model.layers.0.mlp.up_proj.weight_scale" in stored.names()

    llm = LLM(model=str(out), device="cpu", dtype="float32", kv_cache_memory=1 << 22)
    asked = SamplingParams(temperature=0.0, max_tokens=4)
    assert len(llm.generate("abc", asked)[0].outputs[0].token_ids) == 4

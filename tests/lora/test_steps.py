"""Which steps count as having adapters, and what is set aside for them."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.config import EngineArgs
from quire.engine.adapted import adapter_bytes
from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.rows import RequestRows
from quire.step import Admission, StepPlan, Work
from tests.hf import tiny_model
from tests.lora.cases import write_adapter


def admission(row: int, adapter: int) -> Admission:
    params = SamplingParams()
    return Admission(RequestId(row), row, [5, 6], 2, params, row, (), adapter=adapter)


def plan(rows: list[int], *admissions: Admission) -> StepPlan:
    return StepPlan(tuple(Work(RequestId(r), r, 0, 2, True) for r in rows), admissions)


def test_rows_that_enter_are_asked_in_the_plan() -> None:
    """Red when a graph without adapters serves a row that has one, or a row's last owner counts."""
    rows = RequestRows(4, 16, 4, torch.device("cpu"))
    first = plan([0, 1], admission(0, 0), admission(1, 7))
    assert rows.uses_adapters(first)
    rows.apply(first, {})
    assert rows.uses_adapters(plan([1])) and not rows.uses_adapters(plan([0]))
    assert not rows.uses_adapters(plan([1], admission(1, 0)))
    assert not rows.uses_adapters(plan([0], admission(2, 7)))


def test_memory_of_those_named_at_start(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", tiny_model("llama-packable"))
    size = (folder / "adapter_model.safetensors").stat().st_size
    asked = {"a": str(folder), "b": str(folder), "missing": str(tmp_path / "x")}
    assert adapter_bytes(EngineArgs("m", lora=asked)) == 2 * size
    assert adapter_bytes(EngineArgs("m")) == 0

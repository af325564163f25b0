"""What a step launches around the model, counted on a CPU where it does not depend on the device.

`tests/gpu/test_gpu_step_inputs.py` counts the whole step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.gather import StepShape
from quire.runner.rows import RequestRows
from quire.runner.sampling import sample_inputs
from quire.runner.upload import Uploader
from quire.sample.sampler import Sampler
from quire.step import Admission, PageWrite, StepPlan, Work
from tests.runner.launches import Launches, counted

CPU = torch.device("cpu")
VOCAB = 50
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.02},
]


class Case:
    """Requests with prompts of two tokens, in rows of any order; the third token is drawn next."""

    def __init__(self, wishes: list[dict[str, Any]], row_ids: list[int]) -> None:
        self.rows = RequestRows(max_rows=8, max_len=20, max_pages=5, device=CPU)
        self.uploader, self.row_ids = Uploader(CPU), row_ids
        admissions = tuple(
            Admission(RequestId(row), row, [row, row + 1], 2, SamplingParams(**wish), 100 + row, ())
            for row, wish in zip(row_ids, wishes, strict=True)
        )
        works = tuple(Work(RequestId(row), row, 1, 1, True) for row in row_ids)
        writes = tuple(PageWrite(row, 0, row + 1) for row in row_ids)
        self.plan = StepPlan(works, admissions, writes)
        self.shape = StepShape(works, spare_row=8)
        arrays: dict[str, np.ndarray] = {}
        self.shape.stage(arrays)
        self.rows.stage(self.plan, arrays)
        self.sent = self.uploader.send(arrays)

    def apply(self) -> None:
        self.rows.apply(self.plan, self.sent)
        self.rows.set_wishes(self.plan.admissions, self.uploader)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        inputs = sample_inputs(self.rows, self.shape, self.sent, self.uploader)
        return Sampler()(logits, inputs).tokens


@pytest.mark.parametrize("wishes", [WISHES[:1], WISHES], ids=["greedy", "mixed"])
def test_inputs_of_a_plain_draw_launch_nothing(wishes: list[dict[str, Any]]) -> None:
    """Red when a column is gathered or a dtype converted before the kernel that could read it."""
    case = Case(wishes, list(range(len(wishes))))
    case.apply()
    with Launches() as launches:
        sample_inputs(case.rows, case.shape, case.sent, case.uploader)
    assert launches.names == []


def test_edits_are_one_launch_each() -> None:
    """Red when an index must be converted before it can be used: tokens, pages, two columns."""
    with Launches() as launches:
        case = Case(WISHES, [1, 2, 3, 4])
        assert [name for name in counted(launches) if name not in ("zeros", "arange")] == []
        case.apply()
        names = counted(launches)
    on_device = [name for name in names if name not in ("lift_fresh", "detach_")]
    assert on_device == ["index_copy_"] * 4


def test_draws_are_stored_in_their_rows() -> None:
    """Red when a draw is made with another row's wishes or stored in another row's place."""
    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    alone = []
    for i, row in enumerate((6, 0, 3, 7)):
        case = Case([WISHES[i]], [row])
        case.apply()
        alone.append(int(case.draw(logits[i : i + 1])))
    case = Case(WISHES, [6, 0, 3, 7])
    case.apply()
    want = case.rows.tokens.clone()
    drawn = case.draw(logits)
    assert drawn.tolist() == alone
    for row, token in zip(case.row_ids, alone, strict=True):
        want[row, 2] = token
    assert torch.equal(case.rows.tokens, want)

"""Which decodes the Hopper kernel for single queries is given: the choice is made on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from quire.attn.triton import TritonAttention, TritonPlan
from quire.kernels import hopper_caches, paged_split_hopper
from quire.kernels.chip import H200
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_split_hopper import HopperSplit
from quire.kernels.paged_tile import PagedConfig
from tests.paged_case import make_case

DTYPE = torch.bfloat16
KV_HEADS = 2
PROGRAMS = 2 * H200.units


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> tuple[PagedInputs, SplitGrid, PagedConfig]:
    """What a step of two decodes asks of attention, as if this were Hopper."""
    monkeypatch.setattr(hopper_caches, "has_hopper_kernels", lambda device: True)
    case = make_case([64, 70], heads=(8, KV_HEADS), head_dim=128, dtype=DTYPE)
    backend = TritonAttention(DTYPE)
    batch = case.batch([1, 1], [64, 70], [0, 1])
    plan = backend.plan(batch, case.spec, 512)
    assert isinstance(plan, TritonPlan) and plan.split is not None
    table, starts = batch.page_table, batch.query_starts
    inputs = PagedInputs(
        *case.cache(backend)[:2], table, batch.rows, starts, batch.context_lens, case.spec.scale
    )
    return inputs, plan.split, plan.config


@pytest.mark.parametrize(
    ("num_seqs", "lanes", "programs", "is_faster"),
    [
        (1, 1, KV_HEADS, True),
        (PROGRAMS // KV_HEADS, 1, PROGRAMS, True),
        (4 * PROGRAMS // KV_HEADS, 1, PROGRAMS, True),
        (4 * PROGRAMS // KV_HEADS + 1, 1, PROGRAMS, False),
        (3, 5, 15 * KV_HEADS, True),
        (PROGRAMS // KV_HEADS // 2 + 1, 2, PROGRAMS, True),
        (4 * PROGRAMS // KV_HEADS, 2, PROGRAMS, False),
    ],
)
def test_no_more_programs_than_fit_at_once(
    given: tuple[PagedInputs, SplitGrid, PagedConfig],
    monkeypatch: pytest.MonkeyPatch,
    num_seqs: int,
    lanes: int,
    programs: int,
    is_faster: bool,
) -> None:
    inputs, grid, config = given
    launched = []
    monkeypatch.setattr(paged_split_hopper, "_launch", lambda grid, *_: launched.append(grid))
    grid = replace(grid, num_tiles=num_seqs, lanes=lanes)
    q = torch.zeros(num_seqs, 8, 128, dtype=DTYPE)
    hopper = HopperSplit()
    assert hopper.can_run(q, inputs, grid, config)
    assert hopper.is_faster(inputs, grid) == is_faster
    hopper(q, inputs, grid, config, torch.empty_like(q))
    assert launched == [(programs, 1, 1)]


def test_what_it_does_not_compute_is_declined(
    given: tuple[PagedInputs, SplitGrid, PagedConfig],
) -> None:
    inputs, grid, config = given
    q = torch.zeros(2, 8, 128, dtype=DTYPE)
    hopper = HopperSplit()
    assert hopper.can_run(q, inputs, grid, config)
    assert not hopper.can_run(q.float(), inputs, grid, config)
    sinks = torch.zeros(8)
    for odd in (
        replace(inputs, window=64), replace(inputs, softcap=9.0), replace(inputs, sinks=sinks)
    ):  # fmt: skip
        assert not hopper.can_run(q, odd, grid, config)
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    for other in (replace(grid, tiles=tiles), replace(grid, company=4)):
        assert not hopper.can_run(q, inputs, other, config)
    assert not hopper.can_run(q, inputs, grid, replace(config, block_n=32))

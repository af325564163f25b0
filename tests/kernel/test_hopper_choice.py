"""Which decodes the Hopper kernel for single queries is given: the choice is made on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from quire.attn.triton import TritonAttention, TritonPlan
from quire.kernels import hopper_ring, paged_split_hopper
from quire.kernels.paged_split import PagedInputs, SplitGrid
from quire.kernels.paged_split_hopper import PROGRAMS, HopperSplit
from quire.kernels.paged_tile import PagedConfig
from tests.paged_case import make_case

DTYPE = torch.bfloat16
KV_HEADS = 2


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> tuple[PagedInputs, SplitGrid, PagedConfig]:
    """What a step of two decodes asks of attention, as if this were Hopper."""
    monkeypatch.setattr(hopper_ring, "has_hopper_kernels", lambda device: True)
    monkeypatch.setattr(paged_split_hopper, "_launch", lambda *args: None)
    case = make_case([64, 70], heads=(8, KV_HEADS), head_dim=128, dtype=DTYPE)
    backend = TritonAttention(DTYPE)
    batch = case.batch([1, 1], [64, 70], [0, 1])
    plan = backend.plan(batch, case.spec, 512)
    assert isinstance(plan, TritonPlan) and plan.split is not None
    table, starts = batch.page_table, batch.query_starts
    inputs = PagedInputs(
        *case.cache(backend), table, batch.rows, starts, batch.context_lens, case.spec.scale
    )
    return inputs, plan.split, plan.config


@pytest.mark.parametrize(
    ("num_seqs", "lanes", "can_run", "is_faster"),
    [
        (1, 1, True, True),
        (PROGRAMS // KV_HEADS, 1, True, True),
        (4 * PROGRAMS // KV_HEADS, 1, True, True),
        (4 * PROGRAMS // KV_HEADS + 1, 1, True, False),
        (PROGRAMS // KV_HEADS // 2, 2, True, True),
        (PROGRAMS // KV_HEADS // 2 + 1, 2, False, True),  # some programs would have two shares
        (PROGRAMS // KV_HEADS // 16, 16, True, True),
    ],
)
def test_shares_of_a_context_have_a_program_each(
    given: tuple[PagedInputs, SplitGrid, PagedConfig],
    num_seqs: int,
    lanes: int,
    can_run: bool,
    is_faster: bool,
) -> None:
    inputs, grid, config = given
    grid = replace(grid, num_tiles=num_seqs, lanes=lanes)
    q = torch.zeros(num_seqs, 8, 128, dtype=DTYPE)
    hopper = HopperSplit()
    assert hopper.can_run(q, inputs, grid, config) == can_run
    assert hopper.is_faster(inputs, grid) == is_faster
    if can_run:
        hopper(q, inputs, grid, config, torch.empty_like(q))
    else:
        with pytest.raises(AssertionError, match="lanes"):
            hopper(q, inputs, grid, config, torch.empty_like(q))


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

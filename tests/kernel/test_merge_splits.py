"""Merging split states against a softmax over the splits, splits without keys included."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.merge_splits import merge_splits
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_tile import Launch, PagedConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = PagedConfig(16, 32, Launch(16, 4, 2), Launch(16, 4, 2))


def merge(
    acc: torch.Tensor, top: torch.Tensor, total: torch.Tensor, unroll: int | None
) -> torch.Tensor:
    """[splits, heads, dim], [splits, heads], [splits, heads] -> [heads, dim]."""
    splits, heads, dim = acc.shape
    out = torch.full((1, heads, dim), float("nan"), device=DEVICE)
    ints = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    context = torch.tensor([splits * 32], dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(1, 1, 16, dim, device=DEVICE)
    inputs = PagedInputs(pages, pages, ints.view(1, 2), ints, ints, context, 1.0)
    sums = torch.stack([top, total], -1).contiguous()
    grid = SplitGrid(None, 1, 1, splits, 1, acc.contiguous(), sums)
    merge_splits(inputs, grid, CONFIG, out, unroll)
    return out[0]


@pytest.mark.parametrize("splits", [2, 5, 19])
@pytest.mark.parametrize("unroll", [None, 8])
def test_merge(splits: int, unroll: int | None) -> None:
    acc, top = torch.randn(splits, 4, 80, device=DEVICE), 3 * torch.randn(splits, 4, device=DEVICE)
    total = 1 + torch.rand(splits, 4, device=DEVICE)
    top[1], acc[1], total[1] = float("-inf"), 0.0, 0.0  # a split without keys
    weights = (top - top.max(0).values).exp()
    want = (acc * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]
    got = merge(acc, top, total, unroll)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    others = torch.arange(splits, device=DEVICE) != 1
    if splits > 2:  # a split without keys changes no bit
        assert torch.equal(merge(acc[others], top[others], total[others], unroll), got)

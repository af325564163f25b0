"""Codes whose columns are sorted by group: values are where their inputs are."""

from __future__ import annotations

import pytest
import torch

from quire.native.panels import can_be_panels
from quire.quant.coded import Coded


def ordered(seed: int, order: torch.Tensor | None) -> Coded:
    torch.manual_seed(seed)
    codes = torch.randint(0, 16, (6, 64), dtype=torch.uint8)
    return Coded(codes, 4, 32, torch.rand(6, 2), zero=8, order=order)


def test_inputs_get_their_own_columns() -> None:
    """Red when the order is applied the wrong way round, or to some rows only."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    got, straight = ordered(0, order), ordered(0, None).dequantize()
    for column, at in enumerate(order.tolist()):
        assert torch.equal(got.dequantize()[:, at], straight[:, column])
    few = torch.empty(6, 64)
    got.dequantize_to(few, 2)
    assert torch.equal(few, got.dequantize())
    rows = torch.tensor([4, 0, 5])
    assert torch.equal(got.pick(rows).dequantize(), got.dequantize()[rows])
    assert got.num_bytes == ordered(0, None).num_bytes + 64 * 8
    assert can_be_panels(got)


def test_only_weights_of_one_order_are_joined() -> None:
    order = torch.arange(63, -1, -1)
    one, other = ordered(0, order), ordered(1, order.clone())
    assert one.is_like(other)
    joined = one.join(other).dequantize()
    assert torch.equal(joined, torch.cat((one.dequantize(), other.dequantize())))
    assert not one.is_like(ordered(1, torch.arange(64))) and not one.is_like(ordered(1, None))
    assert not ordered(1, None).is_like(one)


def test_neighbours_share_nothing() -> None:
    with pytest.raises(ValueError, match="got inputs 0 to 32 of a weight whose columns are sorted"):
        ordered(0, torch.arange(64)).columns(0, 32)

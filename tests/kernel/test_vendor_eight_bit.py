"""When the vendor's library may multiply floats of eight bits: the check, by a CPU's library.

Whether the GPU's has our bits is `tests/gpu/test_gpu_w8a8.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import vendor_eight_bit as module
from quire.kernels.eight_bit_configs import NARROW_TILE, WIDE_TILE, pick_many
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.round_inputs import RoundedRows
from quire.kernels.silu_mul import silu_mul
from quire.kernels.vendor_eight_bit import Gated, VendorEightBit

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _rows_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds slowly; which rows they are is all the same here."""

    def rows(weight: EightBitWeight) -> RoundedRows:
        codes = torch.randn(2048, weight.shape[1]).clamp(-448, 448).to(E4M3)
        return RoundedRows(codes, torch.rand(2048, 1))

    monkeypatch.setattr(module, "_inputs", rows)


def _weight(
    num_out: int = 512, group: int = 0, paired: bool = False, rows: int = 1
) -> EightBitWeight:
    codes = torch.randn(num_out, 128).to(E4M3)
    return EightBitWeight(codes, torch.rand(1, num_out // rows), group, paired, rows)


def test_one_different_bit_is_disagreement() -> None:
    torch.manual_seed(0)
    weight, batches = _weight(), []

    def same(x: RoundedRows) -> Tensor:
        batches.append(len(x.codes))
        return VendorEightBit()(x, weight, None)

    def one_bit_off(x: RoundedRows) -> Tensor:
        out = same(x)
        if len(x.codes) == max(batches):  # at one batch size only
            out.view(torch.int16)[-1, -1] ^= 1
        return out

    library = VendorEightBit()
    assert library.may_take(weight, None, same) and len(set(batches)) > 1
    assert library.may_take(weight, None, one_bit_off), "a shape is checked once"
    assert not VendorEightBit().may_take(weight, None, one_bit_off)


def test_a_library_without_such_a_product_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("scales of rows are not supported")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert not VendorEightBit().may_take(_weight(), None, lambda x: torch.empty(0))


def test_the_gate_after_it_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a paired weight is taken whose gate in the product has other bits."""
    torch.manual_seed(1)
    weight = _weight(paired=True)
    monkeypatch.setattr(module, "_CHECKED_ROWS", (3, 5))

    def ours(x: RoundedRows) -> Tensor:
        return VendorEightBit()(x, weight, None)

    def gated(x: RoundedRows) -> Tensor:
        return silu_mul(ours(x), interleaved=True)

    def one_bit_off(x: RoundedRows) -> Tensor:
        out = gated(x)
        out.view(torch.int16)[0, 0] ^= 1
        return out

    assert VendorEightBit().may_take(weight, None, ours, Gated("silu", gated))
    assert not VendorEightBit().may_take(weight, None, ours, Gated("silu", one_bit_off))


@pytest.mark.parametrize("weight", [_weight(group=128), _weight(rows=2), _weight(72)])
def test_what_it_never_takes(weight: EightBitWeight) -> None:
    def ours(x: RoundedRows) -> Tensor:
        raise AssertionError("nothing to compare")

    assert not VendorEightBit().may_take(weight, None, ours)


def test_tiles_of_many_rows() -> None:
    """Red when a weight that tiles of 64 by 128 cannot share out in one round gets those."""
    assert pick_many(256, 6144, WIDE_TILE, 132) == NARROW_TILE
    assert pick_many(256, 4096, WIDE_TILE, 132) is None
    assert pick_many(2048, 4096, WIDE_TILE, 132) == WIDE_TILE
    assert pick_many(2048, 4096, NARROW_TILE, 132) == NARROW_TILE
    assert pick_many(16, 4096, WIDE_TILE, 132) is None

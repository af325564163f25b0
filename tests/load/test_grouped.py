"""Groups of whole numbers: any bits, zeros and groups, by the formula alone."""

from __future__ import annotations

import pytest
import torch

from quire.load.grouped import Grouped, consecutive
from quire.native.panels import can_be_panels
from quire.quant.coded import Coded
from quire.quant.weight import Dense

CPU = torch.device("cpu")


def grouped(bits: int, num_in: int, size: int, zeros: int | None) -> tuple[Grouped, torch.Tensor]:
    """`zeros`: the same for all; None: they differ."""
    torch.manual_seed(bits)
    groups = consecutive(num_in, size, CPU)
    shape = (6, int(groups[-1]) + 1)
    codes = torch.randint(0, 2**bits, (6, num_in), dtype=torch.uint8)
    codes[0, :2] = torch.tensor([0, 2**bits - 1])  # the ends of what is there
    scales = torch.rand(shape) + 0.1
    given = torch.randint(0, 2**bits, shape, dtype=torch.uint8)
    given = given if zeros is None else torch.full(shape, zeros, dtype=torch.uint8)
    want = (codes.float() - given[:, groups].float()) * scales[:, groups]
    return Grouped(codes, bits, scales, given, groups), want


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("middle", [True, False])
def test_values(bits: int, middle: bool) -> None:
    """Red when signed bytes are shifted by another amount than their zeros."""
    made, want = grouped(bits, 64, 32, 2 ** (bits - 1) if middle else None)
    got = made.weight()
    assert isinstance(got, Coded) and torch.equal(got.dequantize(), want)
    assert (got.zeros is None) == middle
    assert can_be_panels(got)


@pytest.mark.parametrize("zero", [0, 127, 129, 255])
def test_one_zero_that_signed_bytes_cannot_take_off(zero: int) -> None:
    """Red when it is kept as a single number, which kernels of signed bytes do not subtract."""
    made, want = grouped(8, 64, 32, zero)
    got = made.weight()
    assert isinstance(got, Coded) and torch.equal(got.dequantize(), want)
    assert got.zero == 0 and got.zeros is not None and can_be_panels(got)


@pytest.mark.parametrize(
    "num_in, size, block",
    [(576, 128, 32), (96, 64, 32), (48, 48, 16), (64, 16, 16), (64, 8, None), (40, 40, None)],
)
def test_blocks(num_in: int, size: int, block: int | None) -> None:
    """Red when a ragged last group borrows from its neighbour, or kernels get 48 inputs."""
    made, want = grouped(4, num_in, size, 8)
    got = made.weight()
    assert torch.equal(got.dequantize(), want)
    assert isinstance(got, Dense) if block is None else isinstance(got, Coded)
    if isinstance(got, Coded):
        assert got.block == block and can_be_panels(got) == (num_in % 32 == 0)

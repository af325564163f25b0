"""Eight-bit floats in blocks: every weight has the scale of its own block, however it is cut."""

from __future__ import annotations

import pytest
import torch

from quire.quant.scaled import Scaled, ceil

BLOCKS = [(40, 48), (1, 48), (16, 32), (1, 16), (16, 16)]


def scaled(block: tuple[int, int], seed: int = 0) -> Scaled:
    torch.manual_seed(seed)
    tensor = torch.randn(40, 48).to(torch.float8_e4m3fn)
    return Scaled(tensor, torch.rand(ceil(40, block[0]), ceil(48, block[1])), block)


def expected(weight: Scaled) -> torch.Tensor:
    values = weight.tensor.float()
    for i in range(40):
        for j in range(48):
            values[i, j] *= weight.scales[i // weight.block[0], j // weight.block[1]]
    return values


@pytest.mark.parametrize("block", BLOCKS)
def test_rows_and_columns(block: tuple[int, int]) -> None:
    """Red when a ragged block, a picked row or a cut has a neighbour's scale."""
    weight = scaled(block)
    want = expected(weight)
    assert torch.equal(weight.dequantize(), want)
    rows = torch.tensor([39, 0, 17, 16])
    assert torch.equal(weight.pick(rows).dequantize(), want[rows])
    assert torch.equal(weight.pick(slice(3, 20)).dequantize(), want[3:20])
    assert torch.equal(weight.columns(32, 48).dequantize(), want[:, 32:48])


@pytest.mark.parametrize("block", BLOCKS)
def test_joined_rows(block: tuple[int, int]) -> None:
    one, other = scaled(block), scaled(block, seed=1)
    assert one.is_like(other)
    want = torch.cat((one.dequantize(), other.dequantize()))
    assert torch.equal(one.join(other).dequantize(), want)
    top = Scaled(one.tensor[:32], one.scales[: ceil(32, block[0])], block)
    joined = top.join(other)
    assert torch.equal(joined.dequantize(), torch.cat((one.dequantize()[:32], want[40:])))
    assert (joined.block == block) == (32 % block[0] == 0)


def test_what_cannot_be_cut_or_joined() -> None:
    with pytest.raises(ValueError, match="got inputs 0 to 20, want multiples of 16"):
        scaled((1, 16)).columns(0, 20)
    assert not scaled((1, 16)).is_like(scaled((1, 32)))
    assert scaled((16, 16)).num_bytes == 40 * 48 + 4 * 9

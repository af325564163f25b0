"""W8A8 without a GPU: rows rounded on their own, exact sums of whole numbers, chains of floats."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.eight_bit_matmul import eight_bit_matmul, inputs_of
from quire.kernels.packed_matmul import PackedTile
from quire.kernels.round_inputs import RoundedRows, round_inputs
from quire.kernels.slabs import Slabs
from quire.ops.slabs_of import slabs_of
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled
from tests.native.weights import eight_bits

TILE = PackedTile(16, 64, 2, 4, 64)
E4M3 = torch.float8_e4m3fn


def _int8(num_out: int, num_in: int) -> Coded:
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
    return Coded(codes, 8, 32, torch.rand(num_out, 1), inputs="int8-row", share=num_in // 32)


def _slabs(weight: Coded | Scaled) -> Slabs:
    slabs = slabs_of(weight)
    assert slabs is not None
    return slabs


def test_rows_are_rounded_on_their_own() -> None:
    """Red when a row's codes depend on its neighbours, ties go away from the even number, or a row
    of zeros divides by zero."""
    torch.manual_seed(0)
    x = torch.randn(5, 200).half() * torch.tensor([1, 1e-3, 50, 0, 1]).half()[:, None]
    codes, scales = round_inputs(x, torch.int8)
    most = x.float().abs().amax(1, keepdim=True).clamp_min(1e-5)
    want = (x.float() * (127 / most)).round()
    assert torch.equal(codes.float(), want)
    torch.testing.assert_close(scales, most / 127)
    assert torch.equal(round_inputs(x[2:3], torch.int8).codes, codes[2:3])


def test_groups_of_a_row_have_scales_of_their_own() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 320).half()
    codes, scales = round_inputs(x, torch.int8, 128)
    assert scales.shape == (3, 3)
    wide = scales.repeat_interleave(128, 1)[:, :320]
    assert ((codes.float() * wide - x.float()).abs() <= wide * 0.501).all()


def _exact(x: RoundedRows, weight: Coded, bias: Tensor) -> Tensor:
    codes = weight.codes.view(torch.int8).double()
    total = (x.codes.double() @ codes.T).float()
    return (total * x.scales * weight.scales[:, 0] + bias.float()).half()


@pytest.mark.parametrize("shape", [(70, 128), (40, 288)])
def test_whole_numbers_are_summed_exactly(shape: tuple[int, int]) -> None:
    """Red when a sum is rounded before it is scaled, or tiles change a bit."""
    torch.manual_seed(2)
    weight, bias = _int8(*shape), torch.randn(shape[0]).half()
    slabs = _slabs(weight)
    assert inputs_of(slabs) == torch.int8
    x = round_inputs(torch.randn(19, shape[1]).half(), torch.int8)
    want = _exact(x, weight, bias)
    for tile in (TILE, PackedTile(32, 64, 2, 4, 22)):
        assert torch.equal(eight_bit_matmul(x, slabs, bias, torch.float16, tile), want)


@pytest.mark.parametrize("block", [(1, 0), (0, 0), (32, 128)])
def test_floats_are_summed_by_128(block: tuple[int, int]) -> None:
    """Red when a scale meets another stretch of inputs or rows."""
    torch.manual_seed(3)
    weight = eight_bits(E4M3, block)(40, 384)
    slabs = _slabs(weight)
    assert inputs_of(slabs) == E4M3
    group = 128 if block[1] else None
    rows = round_inputs(torch.randn(5, 384), torch.int8, group)  # whole numbers up to 127
    x = RoundedRows((rows.codes.float() / 16).to(E4M3), rows.scales)
    wide = x.scales.repeat_interleave(group or 384, 1)
    want = (x.codes.double() * wide) @ weight.dequantize().double().T
    got = eight_bit_matmul(x, slabs, None, torch.float32, TILE)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    alone = RoundedRows(x.codes.view(torch.uint8)[3:4].view(E4M3), x.scales[3:4])
    assert torch.equal(eight_bit_matmul(alone, slabs, None, torch.float32, TILE), got[3:4])


def test_who_has_no_such_product() -> None:
    grouped = Coded(torch.zeros(8, 64, dtype=torch.uint8), 8, 32, torch.rand(8, 2))
    assert inputs_of(_slabs(grouped)) is None
    assert inputs_of(_slabs(eight_bits(E4M3, (1, 0))(16, 96))) is None
    assert inputs_of(_slabs(eight_bits(torch.float8_e5m2, (1, 0))(16, 128))) is None

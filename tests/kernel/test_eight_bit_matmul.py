"""W8A8 without a GPU: rows rounded on their own, exact sums of whole numbers, chains of floats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.ops.eight_bit_of import EightBitForm, eight_bit_form, eight_bit_weight
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled
from tests.native.weights import eight_bits

TILE = EightBitTile(16, 64, 2, 4, 64)
E4M3 = torch.float8_e4m3fn


def _int8(num_out: int, num_in: int) -> Coded:
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
    return Coded(codes, 8, 32, torch.rand(num_out, 1), inputs="int8-row", share=num_in // 32)


def _bytes(weight: Coded | Scaled, paired: bool = False) -> EightBitWeight:
    form = eight_bit_form(weight)
    assert form is not None
    return eight_bit_weight(weight, form, paired)


def test_rows_are_rounded_on_their_own() -> None:
    """Red when a row's codes depend on its neighbours, ties go away from the even number, or a row
    of zeros divides by zero."""
    torch.manual_seed(0)
    x = torch.randn(5, 200).half() * torch.tensor([1, 1e-3, 50, 0, 1]).half()[:, None]
    codes, scales = round_inputs(x, Rounding(torch.int8))
    most = x.float().abs().amax(1, keepdim=True).clamp_min(1e-5)
    want = (x.float() * (127 / most)).round()
    assert torch.equal(codes.float(), want)
    torch.testing.assert_close(scales, most / 127)
    assert torch.equal(round_inputs(x[2:3], Rounding(torch.int8)).codes, codes[2:3])


def test_groups_of_a_row_have_scales_of_their_own() -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 320).half()
    codes, scales = round_inputs(x, Rounding(torch.int8, 128))
    assert scales.shape == (3, 3)
    wide = scales.repeat_interleave(128, 1)[:, :320]
    assert ((codes.float() * wide - x.float()).abs() <= wide * 0.501).all()


@pytest.mark.parametrize("num_in", [384, 320])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_many_groups_are_rounded_as_few(
    dtype: torch.dtype, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a program of several groups takes another row's inputs, or forgets the last ones."""
    torch.manual_seed(5)
    wide = torch.randn(7, num_in + 16).bfloat16() * torch.randn(7, 1).exp().bfloat16()
    x = wide[:, :num_in]  # rows with others between them
    want = round_inputs(x, Rounding(dtype, 128))
    monkeypatch.setattr("quire.kernels.round_inputs._MANY", 1)
    got = round_inputs(x, Rounding(dtype, 128))
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)


def _exact(x: RoundedRows, weight: Coded, bias: Tensor) -> Tensor:
    codes = weight.codes.view(torch.int8).double()
    total = (x.codes.double() @ codes.T).float()
    return ((total * weight.scales[:, 0]) * x.scales + bias.float()).half()


@pytest.mark.parametrize("shape", [(70, 128), (40, 288)])
def test_whole_numbers_are_summed_exactly(shape: tuple[int, int]) -> None:
    """Red when a sum is rounded before it is scaled, or tiles change a bit."""
    torch.manual_seed(2)
    weight, bias = _int8(*shape), torch.randn(shape[0]).half()
    made = _bytes(weight)
    x = round_inputs(torch.randn(19, shape[1]).half(), Rounding(torch.int8))
    want = _exact(x, weight, bias)
    for tile in (TILE, EightBitTile(32, 64, 2, 4, 22)):
        assert torch.equal(eight_bit_matmul(x, made, bias, torch.float16, tile), want)


def test_a_scale_that_was_found_beforehand() -> None:
    """Red when it is not the rows' scale, or what is beyond it does not saturate."""
    x = torch.tensor([[0.5, -1.25, 3.0, 1000.0] * 4]).half()
    codes, scales = round_inputs(x, Rounding(torch.int8, scale=0.25))
    assert codes[0, :4].tolist() == [2, -5, 12, 127] and scales.tolist() == [[0.25]]


def test_long_rows_are_rounded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a row that no block holds forgets its first or its last inputs."""
    x = torch.randn(2, 300).half()
    x[0, 0], x[1, 299] = 9.0, -9.0
    want = round_inputs(x, Rounding(torch.int8))
    monkeypatch.setattr("quire.kernels.round_inputs._MOST_BLOCK", 64)
    got = round_inputs(x, Rounding(torch.int8))
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)


@pytest.mark.parametrize("block", [(1, 0), (0, 0), (32, 128)])
def test_floats_are_summed_by_128(block: tuple[int, int]) -> None:
    """Red when a scale meets another stretch of inputs or rows."""
    torch.manual_seed(3)
    weight = replace(eight_bits(E4M3, block)(40, 384), inputs="fp8-128" if block[1] else "fp8-row")
    group = 128 if block[1] else None
    rows = round_inputs(torch.randn(5, 384), Rounding(torch.int8, group))  # up to 127
    x = RoundedRows((rows.codes.float() / 16).to(E4M3), rows.scales)
    wide = x.scales.repeat_interleave(group or 384, 1)
    want = (x.codes.double() * wide) @ weight.dequantize().double().T
    made = _bytes(weight)
    got = eight_bit_matmul(x, made, None, torch.float32, TILE)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    alone = RoundedRows(x.codes.view(torch.uint8)[3:4].view(E4M3), x.scales[3:4])
    assert torch.equal(eight_bit_matmul(alone, made, None, torch.float32, TILE), got[3:4])
    gated = eight_bit_matmul(x, _bytes(weight, paired=True), None, torch.float16, TILE, "silu")
    assert torch.equal(gated, silu_mul(got.half()))


def test_inputs_that_fill_no_chain() -> None:
    """Red when what lies behind a row is summed too."""
    weight = replace(eight_bits(E4M3, (1, 0))(20, 144), inputs="fp8-row")
    x = round_inputs(torch.randn(3, 144), Rounding(torch.int8))
    x = RoundedRows((x.codes.float() / 16).to(E4M3), x.scales)
    want = (x.codes.double() * x.scales) @ weight.dequantize().double().T
    got = eight_bit_matmul(x, _bytes(weight), None, torch.float32, TILE)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_who_has_no_such_product() -> None:
    grouped = Coded(torch.zeros(8, 64, dtype=torch.uint8), 8, 32, torch.rand(8, 2))
    assert eight_bit_form(replace(grouped, inputs="int8-row")) is None
    assert eight_bit_form(_int8(8, 64)) == EightBitForm(Rounding(torch.int8), 0)
    assert eight_bit_form(replace(_int8(8, 64), inputs="float")) is None
    narrow = eight_bits(torch.float8_e5m2, (1, 0))(16, 128)
    assert eight_bit_form(replace(narrow, inputs="fp8-row")) is None
    assert eight_bit_form(replace(eight_bits(E4M3, (1, 0))(16, 100), inputs="fp8-row")) is None

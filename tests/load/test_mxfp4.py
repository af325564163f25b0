"""MXFP4 against transformers' own dequantiser, bit for bit, and the values of the specification."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.errors import CheckpointError
from quire.load.mxfp4 import dequantize, mxfp4_codes


@pytest.mark.parametrize("low,high", [(118, 130), (0, 255)], ids=["usual", "all exponents"])
def test_equals_transformers(low: int, high: int) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(low, high, (3, 40, 5), dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    got = dequantize(blocks, scales, "w")
    assert got.dtype == torch.bfloat16 and got.shape == (3, 40, 160)
    assert torch.equal(got, want)


def test_codes_hold_every_scale() -> None:
    """Red when a block of the smallest scale keeps a weight from staying packed."""
    torch.manual_seed(1)
    blocks = torch.randint(0, 256, (255, 2, 16), dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8).unsqueeze(1).expand(255, 2)
    codes = mxfp4_codes(blocks, scales, "w")
    assert codes is not None
    assert torch.equal(codes.dequantize(), dequantize(blocks, scales, "w").float())


def test_long_tensors_are_made_in_runs() -> None:
    """Red when the last, shorter run is lost."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (1, 1, 140_001, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (1, 1, 140_001), dtype=torch.uint8)
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(dequantize(blocks, scales, "w"), want)


def test_every_code() -> None:
    """Of the specification: E2M1 codes in order, low half of a byte first, scale 2^(s - 127)."""
    codes = torch.arange(16, dtype=torch.uint8)
    block = (codes[0::2] | codes[1::2] << 4).repeat(2).view(1, 16)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    want = [2.0 * v for v in positive + [-v for v in positive]]
    got = dequantize(block, torch.tensor([128], dtype=torch.uint8), "w")
    assert got.tolist() == want + want


def test_an_exponent_that_is_no_number_is_named() -> None:
    """Red when 255 becomes weights that are no numbers, or is read as a power."""
    blocks, scales = torch.zeros(4, 2, 16).byte(), torch.full((4, 2), 127).byte()
    scales[3, 1] = 255
    for make in (dequantize, mxfp4_codes):
        with pytest.raises(CheckpointError, match=r"tensor layer\.w: got 255 among the exponents"):
            make(blocks, scales, "layer.w")


def test_views_of_every_other_row() -> None:
    """Gates and ups are taken from rows in turn: strided inputs."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (8, 2), dtype=torch.uint8)
    whole = dequantize(blocks, scales, "w")
    assert torch.equal(dequantize(blocks[1::2], scales[1::2], "w"), whole[1::2])


@pytest.mark.parametrize(
    "blocks,scales",
    [
        (torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8)),
        (torch.zeros(4, 2, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)),
        (torch.zeros(4, 2, 16), torch.zeros(4, 2, dtype=torch.uint8)),
    ],
)
def test_what_does_not_fit_is_named(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=r"tensor layer\.w: got .* blocks"):
        dequantize(blocks, scales, "layer.w")

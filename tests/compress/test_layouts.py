"""What a layout packs is what its reader makes of it."""

from __future__ import annotations

import pytest
import torch

from quire.compress.grid import Grid
from quire.compress.layouts import awq, compressed, gptq
from quire.compress.layouts.words import to_words
from quire.load.words import dense_codes
from tests.load.held import plain

SHAPES = ((64, 128), (32, 96))


def weight(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_words_are_read_as_they_were_packed(bits: int) -> None:
    """Red when the order of bits changes, or codes that straddle words are cut."""
    codes = torch.randint(0, 2**bits, (5, 77), dtype=torch.uint8)
    words = to_words(codes, bits)
    assert words.shape == (5, -(-77 * bits // 32))
    assert torch.equal(dense_codes(words, bits, 77), codes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, asymmetric: bool, shape: tuple[int, int]) -> None:
    """Red when zeros are not stored less one, or codes along the outputs."""
    grid = Grid(bits, 32, asymmetric)
    codes = grid.nearest(weight(shape))
    tensors = {f"w.{last}": tensor for last, tensor in gptq.pack(codes, grid).items()}
    stored = plain(gptq.said(grid, False, [], False), tensors)
    assert torch.equal(stored.read("w.weight"), codes.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_awq(shape: tuple[int, int]) -> None:
    """Red when outputs of a word lie in another order, or a zero is shifted."""
    grid = Grid(4, 32, True)
    codes = grid.nearest(weight(shape))
    tensors = {f"w.{last}": tensor for last, tensor in awq.pack(codes, grid).items()}
    assert torch.equal(plain(awq.said(grid, []), tensors).read("w.weight"), codes.values())


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_words(bits: int, asymmetric: bool, group: int | None) -> None:
    """Red when zeros are packed along the inputs, or their offset is forgotten."""
    grid = Grid(bits, group, asymmetric, torch.bfloat16)
    codes = grid.nearest(weight((64, 96)))
    tensors = {f"w.{last}": t for last, t in compressed.pack_words(codes, grid).items()}
    said = compressed.said("pack-quantized", compressed.int_weights(grid), None, [])
    assert torch.equal(plain(said, tensors).read("w.weight"), codes.values())


def test_compressed_bytes() -> None:
    """Red when signed bytes are stored as unsigned ones."""
    grid = Grid(8, None, False, torch.float32)
    codes = grid.nearest(weight((64, 96)))
    tensors = {f"w.{last}": t for last, t in compressed.pack_bytes(codes, grid).items()}
    said = compressed.said("int-quantized", compressed.int_weights(grid), None, [])
    assert torch.equal(plain(said, tensors).read("w.weight"), codes.values())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_rounding_is_within_half_a_step(bits: int, asymmetric: bool) -> None:
    """Red when a range is cut off, or zeros are rounded to another code than weights are."""
    grid, given = Grid(bits, 32, asymmetric, torch.float32), weight((16, 64))
    codes = grid.nearest(given)
    step = codes.steps.of_inputs(codes.groups).scales
    moved = (codes.values() - given).abs()
    # A symmetric grid has no code for the very top, an asymmetric one rounds its zero.
    assert bool((moved <= step * (1.0 + 1e-5)).all())
    assert (moved <= step * 0.5001).float().mean() > 0.9

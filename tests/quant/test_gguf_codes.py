"""Codes of GGUF blocks against the `gguf` package, bit for bit, on blocks of random bytes.

Random bytes reach every code, packed scale and exponent, infinities and NaNs included.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.load.gguf_types import GGML_TYPES, GGMLType
from quire.quant.coded import Coded
from quire.quant.gguf_codes import can_code, coded
from tests.load.gguf_oracle import dequantized, sane

pytest.importorskip("gguf")

BY_NAME = {t.name: t for t in GGML_TYPES.values()}
# (bits, block, zero, has offsets) that kernels are written for, blocks below one super scale.
FORMS = {
    "Q4_0": ((4, 32, 8, False), 1),
    "Q4_1": ((4, 32, 0, True), 1),
    "Q5_0": ((5, 32, 16, False), 1),
    "Q5_1": ((5, 32, 0, True), 1),
    "Q8_0": ((8, 32, 0, False), 1),
    "Q2_K": ((2, 16, 0, True), 16),
    "Q3_K": ((4, 16, 4, False), 16),
    "Q4_K": ((4, 32, 0, True), 8),
    "Q5_K": ((5, 32, 0, True), 8),
    "Q6_K": ((6, 16, 32, False), 16),
    "IQ4_NL": ((4, 32, 0, False), 1),
    "IQ4_XS": ((4, 32, 0, False), 8),
    "MXFP4": ((4, 32, 0, False), 1),
    "NVFP4": ((4, 16, 0, False), 1),
    "Q1_0": ((2, 32, 1, False), 1),
    "Q2_0": ((2, 32, 1, False), 1),
    "TQ1_0": ((2, 32, 1, False), 1),
    "TQ2_0": ((2, 32, 1, False), 1),
}
SHARES = {"Q1_0": 4, "Q2_0": 2, "TQ1_0": 8, "TQ2_0": 8}  # blocks that share a scale
ALL = pytest.mark.parametrize("name", FORMS)


def random_rows(kind: GGMLType, rows: int, blocks: int) -> torch.Tensor:
    rng = np.random.default_rng([kind.id, rows, blocks])
    size = (rows, blocks * kind.block_bytes)
    return torch.from_numpy(sane(rng.integers(0, 256, size, dtype=np.uint8), kind))


def reference(packed: torch.Tensor, kind: GGMLType) -> np.ndarray:
    return dequantized(packed.numpy(), kind)


def assert_same(got: Coded, want: Coded) -> None:
    for field in ("codes", "scales", "offsets", "super_scales", "super_offsets"):
        ours, theirs = getattr(got, field), getattr(want, field)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), field)


def test_types_with_codes() -> None:
    assert {t.name for t in GGML_TYPES.values() if can_code(t)} == set(FORMS)


@ALL
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 40)])
def test_equal_to_the_reference(name: str, shape: tuple[int, int]) -> None:
    kind = BY_NAME[name]
    packed = random_rows(kind, *shape)
    got = coded(packed, kind)
    assert got.shape == (shape[0], shape[1] * kind.block_size)
    np.testing.assert_array_equal(got.dequantize().numpy(), reference(packed, kind))


@ALL
def test_form_is_one_that_kernels_know(name: str) -> None:
    kind = BY_NAME[name]
    got = coded(random_rows(kind, 6, 4), kind)
    form, super_size = FORMS[name]
    assert (got.bits, got.block, got.zero, got.offsets is not None) == form
    assert got.codes.dtype == torch.uint8
    assert int(got.codes.max()) < 1 << got.bits
    num_blocks = got.shape[1] // got.block
    assert got.share == SHARES.get(name, 1)
    assert got.scales.shape == (6, num_blocks // got.share)
    assert got.super_size == super_size
    assert (got.super_scales is None) == (super_size == 1 and not got.eighths)
    if got.eighths:  # one for a row
        assert got.super_scales is not None and got.super_scales.shape == (6, 1)
        return
    for tensor in (got.super_scales, got.super_offsets):
        if tensor is not None:
            assert tensor.dtype == torch.float16
            assert tensor.shape == (6, num_blocks // super_size)
    if got.offsets is not None:
        assert (got.offsets.dtype, got.offsets.shape) == (got.scales.dtype, got.scales.shape)
        assert (got.super_offsets is None) == (super_size == 1)
    everything = (got.codes, got.scales, got.offsets, got.super_scales, got.super_offsets)
    assert all(t.is_contiguous() for t in everything if t is not None)


@ALL
def test_nothing_holds_on_to_the_file(name: str) -> None:
    """Red when a part is a view: the mapping would stay, with all of its pages."""
    kind = BY_NAME[name]
    packed = random_rows(kind, 1, 1)
    want = coded(packed.clone(), kind)
    got = coded(packed, kind)
    packed.zero_()
    assert_same(got, want)


@ALL
def test_runs_leave_no_seams(name: str) -> None:
    """Red when blocks at the end of a run, or in the last and shorter run, are lost."""
    kind = BY_NAME[name]
    num_blocks = (1 << 18) // kind.block_size + 3
    packed = random_rows(kind, num_blocks, 1)
    whole = coded(packed, kind)
    for at in (0, num_blocks - 4, num_blocks - 3, num_blocks - 1):
        assert_same(whole.pick(slice(at, at + 1)), coded(packed[at : at + 1], kind))


@ALL
def test_pick_takes_rows_in_any_order(name: str) -> None:
    kind = BY_NAME[name]
    packed, rows = random_rows(kind, 6, 2), torch.tensor([4, 0, 5, 0])
    picked = coded(packed, kind).pick(rows)
    assert_same(picked, coded(packed[rows], kind))
    want = reference(packed[rows], kind)
    np.testing.assert_array_equal(picked.dequantize().numpy(), want)


def test_every_exponent_of_mxfp4() -> None:
    """The two lowest make fp32 denormals."""
    packed = random_rows(BY_NAME["MXFP4"], 255, 1)
    packed[:, 0] = torch.arange(255, dtype=torch.uint8)
    got = coded(packed, BY_NAME["MXFP4"]).dequantize().numpy()
    np.testing.assert_array_equal(got, reference(packed, BY_NAME["MXFP4"]))


def test_tiny_scales_are_kept() -> None:
    """Denormal fp16 scales are usual in files: red when they become zero."""
    packed = torch.ones(1, 34, dtype=torch.uint8)
    packed[0, 1] = 0  # fp16 0x0001
    weights = coded(packed, BY_NAME["Q8_0"]).dequantize()
    assert weights.eq(2.0**-24).all()

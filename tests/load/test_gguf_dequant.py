"""Decoders against the `gguf` package, bit for bit, on blocks of random bytes.

Random bytes reach every nibble, high bit and packed scale, infinities and NaNs included.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.load.dequant import NATIVE_DTYPES, dequantize
from quire.load.gguf_types import GGML_TYPES
from tests.load.gguf_oracle import dequantized, sane

oracle = pytest.importorskip("gguf")

BY_NAME = {t.name: t for t in GGML_TYPES.values()}
BLOCK_TYPES = [name for name in BY_NAME if name not in NATIVE_DTYPES]


def test_sizes_agree_with_the_reference_table() -> None:
    for kind in GGML_TYPES.values():
        if kind.id > max(oracle.GGMLQuantizationType):  # newer than the package
            continue
        theirs = oracle.GGMLQuantizationType(kind.id)
        assert theirs.name == kind.name
        assert oracle.GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.block_bytes)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 2)])
def test_equal_to_the_reference(name: str, shape: tuple[int, ...]) -> None:
    kind = BY_NAME[name]
    rng = np.random.default_rng([kind.id, *shape])
    row_bytes = shape[-1] * kind.block_bytes
    packed = sane(rng.integers(0, 256, (*shape[:-1], row_bytes), dtype=np.uint8), kind)
    want = dequantized(packed, kind)
    got = dequantize(torch.from_numpy(packed), kind)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("weights", [1 << 15, 1 << 18, 1 << 22], ids=["short", "some", "long"])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_runs_leave_no_seams(name: str, weights: int) -> None:
    """A little more than one run of blocks, short and long: the rest must not be lost."""
    kind = BY_NAME[name]
    blocks = weights // kind.block_size + 3
    rng = np.random.default_rng(kind.id)
    packed = torch.from_numpy(rng.integers(0, 256, (blocks, kind.block_bytes), dtype=np.uint8))
    whole = dequantize(packed, kind)
    for at in (0, blocks - 4, blocks - 3, blocks - 1):
        one = dequantize(packed[at], kind)
        np.testing.assert_array_equal(whole[at].numpy(), one.numpy())


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_default_device_does_not_matter(name: str) -> None:
    """Red when a table or a result is made on the device that a caller has set for parameters."""
    kind = BY_NAME[name]
    packed = torch.full((2, kind.block_bytes), 53, dtype=torch.uint8)
    want = dequantize(packed, kind)
    with torch.device("meta"):
        got = dequantize(packed, kind)
    np.testing.assert_array_equal(got.numpy(), want.numpy())

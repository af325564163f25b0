"""Blocks with a scale that is no number, against what the `gguf` package makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.load.dequant import NATIVE_DTYPES
from quire.load.gguf_scales import find_bad_block
from quire.load.gguf_types import GGML_TYPES
from tests.load.gguf_oracle import dequantized

pytest.importorskip("gguf")

BY_NAME = {t.name: t for t in GGML_TYPES.values()}
NO_HALVES = (*NATIVE_DTYPES, "MXFP4", "NVFP4")
HALF_TYPES = [name for name in BY_NAME if name not in NO_HALVES]


@pytest.mark.parametrize("name", HALF_TYPES)
def test_found_where_weights_are_not_finite(name: str) -> None:
    """Finite fp16 scales never overflow fp32, so weights tell which blocks are bad."""
    kind = BY_NAME[name]
    rng = np.random.default_rng(kind.id)
    packed = rng.integers(0, 256, (400, kind.block_bytes), dtype=np.uint8)
    weights = dequantized(packed, kind)
    is_bad = ~np.isfinite(weights).all(axis=1)
    found = [find_bad_block(block, kind) == 0 for block in torch.from_numpy(packed)]
    assert found == is_bad.tolist()
    assert 0 < sum(found) < 100
    at = find_bad_block(torch.from_numpy(packed), kind)
    assert at is not None and is_bad[at]


def test_exponents_of_mxfp4() -> None:
    """Only the highest stands for no number."""
    packed = torch.zeros(256, 17, dtype=torch.uint8)
    packed[:, 0] = torch.arange(256, dtype=torch.uint8)
    assert find_bad_block(packed, BY_NAME["MXFP4"]) == 255
    assert find_bad_block(packed[:255], BY_NAME["MXFP4"]) is None


def test_scales_of_nvfp4() -> None:
    """Red when one of the four is not looked at. 0x7F is a zero to ggml, and 0xFF is nothing."""
    for at in range(4):
        packed = torch.zeros(256, 36, dtype=torch.uint8)
        packed[:, at] = torch.arange(256, dtype=torch.uint8)
        assert find_bad_block(packed, BY_NAME["NVFP4"]) == 255
        assert find_bad_block(packed[:255], BY_NAME["NVFP4"]) is None

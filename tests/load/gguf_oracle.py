"""What ggml makes of packed blocks: the `gguf` package's word, or the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.load.gguf_types import GGMLType

DEFINED = ("Q1_0", "Q2_0")  # the package knows sizes at most


def dequantized(packed: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32]:
    import gguf

    with np.errstate(all="ignore"):
        if kind.name in DEFINED:
            return _by_definition(packed, kind)
        made: Any = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(kind.id))
        return np.asarray(made)


def _by_definition(packed: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32]:
    """An fp16, then neighbours from the lowest bits on: signs, or whole numbers from -1 to 2."""
    blocks = packed.reshape(-1, kind.block_bytes)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32)
    numbers = 2 * bits - 1 if kind.name == "Q1_0" else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    made: NDArray[np.float32] = (scale * numbers).reshape(*packed.shape[:-1], -1)
    return made


def sane(packed: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.uint8]:
    """Without the scale of NVFP4 that is refused when it is read."""
    if kind.name == "NVFP4":
        blocks = packed.reshape(-1, kind.block_bytes)
        blocks[:, :4] = np.minimum(blocks[:, :4], 0xFE)
    return packed

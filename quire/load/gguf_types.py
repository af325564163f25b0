"""The storage types a GGUF tensor may have: how many weights share a block, and its bytes.

Sizes only; what the bits mean is in `quant/gguf_codes.py` and `iq_blocks.py`. Every type here can
be decoded (`dequant.py`). Types that ggml uses only in flight (Q8_1, Q8_K) never reach a file
and are left out, so one of them in a header is reported as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One storage type: `block_size` weights of a row packed into `block_bytes` bytes."""

    id: int
    name: str
    block_size: int
    block_bytes: int


# Published ggml block layouts. Scales come first in the sums, packed weights last.
GGML_TYPES: dict[int, GGMLType] = {
    t.id: t
    for t in (
        GGMLType(0, "F32", 1, 4),
        GGMLType(1, "F16", 1, 2),
        GGMLType(2, "Q4_0", 32, 2 + 16),
        GGMLType(3, "Q4_1", 32, 4 + 16),
        GGMLType(6, "Q5_0", 32, 2 + 4 + 16),
        GGMLType(7, "Q5_1", 32, 4 + 4 + 16),
        GGMLType(8, "Q8_0", 32, 2 + 32),
        GGMLType(10, "Q2_K", 256, 4 + 16 + 64),
        GGMLType(11, "Q3_K", 256, 2 + 12 + 32 + 64),
        GGMLType(12, "Q4_K", 256, 4 + 12 + 128),
        GGMLType(13, "Q5_K", 256, 4 + 12 + 32 + 128),
        GGMLType(14, "Q6_K", 256, 2 + 16 + 64 + 128),
        GGMLType(16, "IQ2_XXS", 256, 2 + 64),
        GGMLType(17, "IQ2_XS", 256, 2 + 8 + 64),
        GGMLType(18, "IQ3_XXS", 256, 2 + 32 + 64),
        GGMLType(19, "IQ1_S", 256, 2 + 16 + 32),
        GGMLType(20, "IQ4_NL", 32, 2 + 16),
        GGMLType(21, "IQ3_S", 256, 2 + 4 + 8 + 32 + 64),
        GGMLType(22, "IQ2_S", 256, 2 + 16 + 64),
        GGMLType(23, "IQ4_XS", 256, 4 + 4 + 128),
        GGMLType(24, "I8", 1, 1),
        GGMLType(25, "I16", 1, 2),
        GGMLType(26, "I32", 1, 4),
        GGMLType(27, "I64", 1, 8),
        GGMLType(28, "F64", 1, 8),
        GGMLType(29, "IQ1_M", 256, 8 + 16 + 32),
        GGMLType(30, "BF16", 1, 2),
        GGMLType(34, "TQ1_0", 256, 2 + 4 + 48),
        GGMLType(35, "TQ2_0", 256, 2 + 64),
        GGMLType(39, "MXFP4", 32, 1 + 16),
        GGMLType(40, "NVFP4", 64, 4 + 32),
        GGMLType(41, "Q1_0", 128, 2 + 16),
        GGMLType(42, "Q2_0", 64, 2 + 16),
    )
}

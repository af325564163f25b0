"""From GGUF blocks to float32, exactly as ggml defines them.

The order of the float operations is the format's own (scale first, then the weight, then the
offset), so results are equal bit for bit to other exact readers. Work goes in runs of blocks small
enough that the passes over a run stay in cache. What the bits mean is in `quant/gguf_codes.py`,
which also serves those who keep weights packed, and in `iq_blocks.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.load.gguf_types import GGMLType
from quire.load.iq_blocks import EXPANDERS
from quire.quant.gguf_codes import coded

# Weights per run. A short one is at most torch's grain for threading, so its ops never start a
# parallel region: for the tensors of a small model, the barrier after each op costs more than the
# second core brings (0.4 s became 20 s with other processes on the cores). A long one is worth it.
_SHORT_RUN = 1 << 15
_LONG_RUN = 1 << 22
_CODED = 1 << 18  # weights whose codes and scales are taken out at once, for several short runs

NATIVE_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def dequantize(packed: Tensor, kind: GGMLType) -> Tensor:
    """Packed uint8 [..., row_bytes] to float32 [..., row], for the block types.

    >>> from quire.load.gguf_types import GGML_TYPES
    >>> dequantize(torch.zeros(3, 34, dtype=torch.uint8), GGML_TYPES[8]).shape
    torch.Size([3, 32])
    """
    blocks, size = packed.reshape(-1, kind.block_bytes), kind.block_size
    out = torch.empty(blocks.shape[0], size, dtype=torch.float32, device="cpu")
    run = (_LONG_RUN if out.numel() >= _LONG_RUN else _SHORT_RUN) // size
    expand = EXPANDERS.get(kind.name)
    most = max(run, _CODED // size) if expand is None else run
    for some, into in zip(blocks.split(most), out.split(most), strict=True):
        if expand is None:
            coded(some, kind).dequantize_to(into, run)
        else:
            into.copy_(expand(some))
    return out.view(*packed.shape[:-1], -1)

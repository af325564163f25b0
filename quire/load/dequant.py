"""From GGUF blocks to float32, exactly as ggml defines them.

Each decoder takes blocks [n, block_bytes] and fills out [n, block_size], whole arrays at a time.
The order of the float operations is the format's own (scale first, then the weight, then the
offset), so results are equal bit for bit to other exact readers. Work goes in runs of blocks small
enough that the passes over a run stay in cache. For keeping weights packed, see `GGUFFile.raw`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.load.gguf_types import GGMLType

# Weights per run. A short one is at most torch's grain for threading, so its ops never start a
# parallel region: for the tensors of a small model, the barrier after each op costs more than the
# second core brings (0.4 s became 20 s with other processes on the cores). A long one is worth it.
_SHORT_RUN = 1 << 15
_LONG_RUN = 1 << 22

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


def can_decode(kind: GGMLType) -> bool:
    return kind.name in NATIVE_DTYPES or kind.name in _DECODERS


def dequantize(packed: Tensor, kind: GGMLType) -> Tensor:
    """Packed uint8 [..., row_bytes] to float32 [..., row], for the block types.

    >>> from quire.load.gguf_types import GGML_TYPES
    >>> dequantize(torch.zeros(3, 34, dtype=torch.uint8), GGML_TYPES[8]).shape
    torch.Size([3, 32])
    """
    decode = _DECODERS[kind.name]
    blocks = packed.reshape(-1, kind.block_bytes)
    out = torch.empty(blocks.shape[0], kind.block_size, dtype=torch.float32, device="cpu")
    run = (_LONG_RUN if out.numel() >= _LONG_RUN else _SHORT_RUN) // kind.block_size
    for start in range(0, blocks.shape[0], run):
        decode(blocks[start : start + run], out[start : start + run])
    return out.view(*packed.shape[:-1], -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low nibbles fill the first half of each 32 (or 2 x 32) weights, high ones the second."""
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4


def _bits(packed: Tensor) -> Tensor:
    """[n, bytes] to its single bits [n, bytes * 8], lowest first."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out.view(-1, 2, 16))
    out.add_(_bits(blocks[:, 2:6]) << 4).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out.view(-1, 2, 16))
    out.add_(_bits(blocks[:, 4:8]) << 4).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and offset of the eight 32-weight groups of a Q4_K or Q5_K block, each [n, 8, 1].

    Twelve bytes hold 8 scales and 8 offsets of 6 bits. Groups 0-3 have theirs in the low six bits
    of bytes 0-3 and 4-7; groups 4-7 take a nibble of bytes 8-11 and the two top bits left over.
    """
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    offsets = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), dim=1)
    scale = scales.float().mul_(_half(blocks, 0))
    offset = offsets.float().mul_(_half(blocks, 2))
    return scale.unsqueeze(-1), offset.unsqueeze(-1)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scale, offset = _k_scales(blocks)
    # Each 32 bytes carry two groups: [n, 4, 2, 32] weights.
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    out.view(-1, 8, 32).mul_(scale).sub_(offset)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scale, offset = _k_scales(blocks)
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    # Byte i of the 32 high bytes holds the fifth bit of weight i of group g in its bit g.
    group = torch.arange(8, dtype=torch.uint8, device="cpu").view(1, 8, 1)
    fifth = (blocks[:, None, 16:48] >> group & 1) << 4
    out.view(-1, 8, 32).add_(fifth).mul_(scale).sub_(offset)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    # Two halves of 128 weights; in each, 64 low bytes carry the low nibbles of four groups of 32
    # (first the low nibbles of groups 0 and 1, then the high ones for 2 and 3) and 32 high bytes
    # carry their top two bits, group g in bits 2g and 2g + 1.
    _nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 2, 64))
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu").view(1, 1, 4, 1)
    top = (blocks[:, 128:192].view(-1, 2, 1, 32) >> shift & 3) << 4
    out.view(-1, 2, 4, 32).add_(top).sub_(32)
    scale = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    out.view(-1, 16, 16).mul_(scale.unsqueeze(-1))


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

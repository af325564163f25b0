"""Codes into packed words: the reverse of `load/words.py`, one stream of bits, lowest first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def to_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, count] -> int32 [rows, ceil(count * bits / 32)].

    >>> to_words(torch.tensor([[1, 2, 0]], dtype=torch.uint8), 3).tolist()
    [[17]]
    """
    stream = to_bytes(codes, bits)
    stream = F.pad(stream, (0, -stream.shape[1] % 4))
    return stream.contiguous().view(torch.int32)


def to_bytes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [rows, count] -> uint8 [rows, bytes]; bits above the last code are 0."""
    if bits == 8:
        return codes.contiguous()
    if 8 % bits == 0:
        codes = F.pad(codes, (0, -codes.shape[1] % (8 // bits)))
        some = codes.unflatten(1, (-1, 8 // bits))
        out = some[..., 0].clone()
        for i in range(1, 8 // bits):
            out |= some[..., i] << bits * i
        return out
    # Eight codes lie in as many bytes as a code has bits.
    some = F.pad(codes, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    number = some[..., 0].long()
    for i in range(1, 8):
        number |= some[..., i].long() << bits * i
    parts = [((number >> 8 * i) & 255).byte() for i in range(bits)]
    return torch.stack(parts, -1).flatten(1)[:, : -(-codes.shape[1] * bits // 8)]

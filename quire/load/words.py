"""Codes out of packed words: whole numbers of 1 to 8 bits, one to a byte afterwards.

*Dense* words are one stream of bits, the least significant first, so a code may lie in two of them.
*Padded* words hold as many whole codes as fit, and the bits above are unused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 or uint8 [rows, words] -> uint8 [rows, count].

    >>> dense_codes(torch.tensor([[0b010_001]], dtype=torch.int32), 3, 3).tolist()
    [[1, 2, 0]]
    """
    # Flat in between: one column of a transposed matrix counts as contiguous, and is no view.
    stream, mask = words.reshape(-1).view(torch.uint8).view(len(words), -1), (1 << bits) - 1
    if bits == 8:
        return stream[:, :count]
    if 8 % bits == 0:
        parts = [(stream >> shift) & mask for shift in range(0, 8, bits)]
    else:  # eight codes lie in as many bytes as a code has bits
        stream = F.pad(stream, (0, -stream.shape[1] % bits)).view(len(stream), -1, bits)
        number = stream[..., 0].long()
        for i in range(1, bits):
            number |= stream[..., i].long() << 8 * i
        parts = [((number >> bits * i) & mask).byte() for i in range(8)]
    return torch.stack(parts, -1).flatten(1)[:, :count]


def padded_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, count].

    >>> padded_codes(torch.tensor([[1, 2]], dtype=torch.int32), 5, 7).tolist()
    [[1, 0, 0, 0, 0, 0, 2]]
    """
    mask = (1 << bits) - 1
    parts = [((words >> bits * i) & mask).byte() for i in range(32 // bits)]
    return torch.stack(parts, -1).flatten(1)[:, :count]


def _dense_width(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _padded_width(count: int, bits: int) -> int:
    return -(-count // (32 // bits))


@dataclass(frozen=True, slots=True)
class Packing:
    codes: Callable[[Tensor, int, int], Tensor]  # of words, bits and the number of codes
    width: Callable[[int, int], int]  # words of that many codes of that many bits


DENSE = Packing(dense_codes, _dense_width)
PADDED = Packing(padded_codes, _padded_width)

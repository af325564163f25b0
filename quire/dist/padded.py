"""Padded: shares of unequal sizes as pieces of one size, which is what libraries gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_columns(x: Tensor, widths: Sequence[int]) -> Tensor:
    """[rows, own width] -> [rows, widest]."""
    return x if x.shape[1] == max(widths) else F.pad(x, (0, max(widths) - x.shape[1]))


def join_columns(every: Tensor, widths: Sequence[int]) -> Tensor:
    """[ranks, rows, widest] -> [rows, sum(widths)]."""
    if min(widths) == every.shape[2]:
        return every.transpose(0, 1).reshape(every.shape[1], sum(widths))
    return torch.cat([each[:, :width] for each, width in zip(every, widths, strict=True)], 1)


def pad_rows(x: Tensor, counts: Sequence[int]) -> Tensor:
    """[own rows, width] -> [most rows, width]."""
    return x if len(x) == max(counts) else F.pad(x, (0, 0, 0, max(counts) - len(x)))


def join_rows(every: Tensor, counts: Sequence[int]) -> Tensor:
    """[ranks, most rows, width] -> [sum(counts), width]."""
    return torch.cat([each[:count] for each, count in zip(every, counts, strict=True)])


def bits_of(x: Tensor) -> Tensor:
    """The same memory as whole numbers: a sum of floats would turn -0.0 into 0.0."""
    return x.view(torch.int32) if x.dtype.itemsize == 4 else x.view(torch.uint8)

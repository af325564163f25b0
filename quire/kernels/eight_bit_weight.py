"""A weight of eight bits as products of eight by eight bits read it: plain rows of bytes.

Nothing is unpacked on its way to the matrix unit, so there is no reason for slabs. The vendor's
library wants plain rows too. Where rows of gate and up take turns and neighbours shared scales, the
scales stay where they were, and a kernel asks `scale_row` for a row's. Experts lie one below the
other. The arithmetic is in `eight_bit_matmul.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.matmul import interleave

__all__ = ["CHAIN", "EightBitWeight", "scale_row"]

CHAIN = 128  # inputs that the matrix unit sums on its own


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    codes: Tensor  # [out, in] int8 or float8_e4m3fn
    scales: Tensor  # [groups, ceil(out / rows)] fp32
    group: int = 0  # inputs that share a scale, a multiple of CHAIN; 0: all of a row
    paired: bool = False  # rows were gate | up and are gate, up, gate, up ...
    rows: int = 1  # that share a scale; more than one are those before rows were paired

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_int(self) -> bool:
        return self.codes.dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    @property
    def row_scales(self) -> Tensor:
        """[groups, out]"""
        if self.rows == 1:
            return self.scales
        wide = self.scales.repeat_interleave(self.rows, 1)[:, : self.shape[0]]
        return interleave(wide.t()).t() if self.paired else wide


@triton.jit
def scale_row(rows, N, ROWS: tl.constexpr, PAIRED: tl.constexpr):
    """The column of `scales` of each row, of N in all."""
    if ROWS > 1:
        if PAIRED:
            rows = rows % 2 * (N // 2) + rows // 2
        rows = rows // ROWS
    return rows

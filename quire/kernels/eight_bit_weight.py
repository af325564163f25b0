"""A weight of eight bits as products of eight by eight bits read it: plain rows of bytes.

Nothing is unpacked on its way to the matrix unit, so there is no reason for slabs. The vendor's
library wants plain rows too. Scales lie one for each row, also where a checkpoint has them for
blocks of rows, so that rows of gate and up may take turns. The arithmetic is in
`eight_bit_matmul.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CHAIN", "EightBitWeight"]

CHAIN = 128  # inputs that the matrix unit sums on its own


@dataclass(frozen=True, slots=True)
class EightBitWeight:
    codes: Tensor  # [out, in] int8 or float8_e4m3fn
    scales: Tensor  # [groups, out] fp32
    group: int = 0  # inputs that share a scale, a multiple of CHAIN; 0: all of a row
    paired: bool = False  # rows were gate | up and are gate, up, gate, up ...

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_int(self) -> bool:
        return self.codes.dtype == torch.int8

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

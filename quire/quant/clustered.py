"""Clustered: a weight kept as codes of two to four bits, with values of its own for each row.

    weight[row, column] = values[row, code]

What `quire quantize --method codebook` writes. Devices expand it to floats. `dequantize` is the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.quant.weight import Inputs, Weight


@dataclass(frozen=True, slots=True)
class Clustered:
    """A weight [out, in]."""

    codes: Tensor  # [out, in] uint8, each below 2**bits
    values: Tensor  # [out, 2**bits] floats
    inputs: Inputs = "float"

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Codes lie one to a byte here, and are counted in their bits."""
        bits = (self.values.shape[1] - 1).bit_length()
        return self.codes.numel() * bits // 8 + self.values.numel() * self.values.element_size()

    def dequantize(self) -> Tensor:
        """[out, in] fp32."""
        return self.values.float().gather(1, self.codes.long())

    def pick(self, rows: Tensor | slice) -> Clustered:
        return replace(
            self, codes=self.codes[rows].contiguous(), values=self.values[rows].contiguous()
        )

    def columns(self, begin: int, end: int) -> Clustered:
        return replace(self, codes=self.codes[:, begin:end].contiguous())

    def is_like(self, other: Weight) -> bool:
        return (
            isinstance(other, Clustered)
            and self.shape[1] == other.shape[1]
            and self.inputs == other.inputs
            and self.values.dtype == other.values.dtype
            and self.values.shape[1] == other.values.shape[1]
        )

    def join(self, below: Clustered) -> Clustered:
        codes = torch.cat((self.codes, below.codes))
        return replace(self, codes=codes, values=torch.cat((self.values, below.values)))

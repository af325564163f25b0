"""Codebook: a weight kept as codes of four bits that stand for floats, times a scale a block.

    weight = values[code] * scale

bitsandbytes' NF4 and FP4. `dequantize` is the reference that kernels are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.quant.weight import Inputs, Weight


@dataclass(frozen=True, slots=True)
class Codebook:
    """A weight [out, in]."""

    codes: Tensor  # [out, in] uint8, each below 16
    values: tuple[float, ...]  # 16 of them
    scales: Tensor  # [out, in / block] fp32
    inputs: Inputs = "float"

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """Codes lie one to a byte here, and are counted in their bits."""
        return self.codes.numel() // 2 + 4 * self.scales.numel()

    def dequantize(self) -> Tensor:
        """[out, in] fp32: products rounded once."""
        values = torch.tensor(self.values, dtype=torch.float32, device=self.codes.device)
        out = values.index_select(0, self.codes.view(-1).int())
        out.view(*self.scales.shape, -1).mul_(self.scales.unsqueeze(-1))
        return out.view(self.shape)

    def pick(self, rows: Tensor | slice) -> Codebook:
        return replace(
            self, codes=self.codes[rows].contiguous(), scales=self.scales[rows].contiguous()
        )

    def columns(self, begin: int, end: int) -> Codebook:
        block = self.block
        if begin % block or end % block:
            raise ValueError(
                f"got inputs {begin} to {end}, want multiples of {block}: they share scales"
            )
        codes = self.codes[:, begin:end].contiguous()
        scales = self.scales[:, begin // block : end // block].contiguous()
        return replace(self, codes=codes, scales=scales)

    def is_like(self, other: Weight) -> bool:
        return (
            isinstance(other, Codebook)
            and self.shape[1] == other.shape[1]
            and self.block == other.block
            and self.values == other.values
            and self.inputs == other.inputs
        )

    def join(self, below: Codebook) -> Codebook:
        codes = torch.cat((self.codes, below.codes))
        return replace(self, codes=codes, scales=torch.cat((self.scales, below.scales)))

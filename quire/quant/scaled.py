"""Scaled: a weight kept as floats of eight bits, with a scale for each rectangle of it.

A rectangle may be the whole weight, a row, a stretch of a row, or a block such as 128 by 128; those
at the lower and right edge may be cut off. `dequantize` is the reference that kernels are tested
against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.quant.weight import Inputs, Weight

_RUN = 1 << 18  # weights made at once: what lies between stays in cache


@dataclass(frozen=True, slots=True)
class Scaled:
    """A weight [out, in]; see `ceil` for the shape of its scales."""

    tensor: Tensor  # [out, in] float8_e4m3fn or float8_e5m2
    scales: Tensor  # [ceil(out / block[0]), ceil(in / block[1])] fp32
    block: tuple[int, int]  # outputs and inputs that share a scale
    inputs: Inputs = "float"
    input_scale: float | None = None  # of "fp8-one"

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() + 4 * self.scales.numel()

    def dequantize(self) -> Tensor:
        """[out, in] fp32: products rounded once."""
        num_out, num_in = self.shape
        out = torch.empty(self.shape, dtype=torch.float32, device=self.tensor.device)
        step = max(1, _RUN // num_in)
        for start in range(0, num_out, step):
            rows = torch.arange(start, min(start + step, num_out), device=out.device)
            scales = self.scales[rows // self.block[0]].repeat_interleave(self.block[1], 1)
            out[rows] = self.tensor[start : start + step].float() * scales[:, :num_in]
        return out

    def pick(self, rows: Tensor | slice) -> Scaled:
        """Rows that begin with a block keep blocks; others get scales of their own."""
        if isinstance(rows, slice) and (blocks := self._blocks_of(rows)) is not None:
            tensor = self.tensor.view(torch.uint8)[rows].contiguous().view(self.tensor.dtype)
            return replace(self, tensor=tensor, scales=self.scales[blocks].contiguous())
        own = self.by_row()
        # Indexing knows no floats of eight bits everywhere, bytes it does.
        bytes_ = self.tensor.view(torch.uint8)[rows].contiguous()
        picked = bytes_.view(self.tensor.dtype), own[rows].contiguous()
        return replace(self, tensor=picked[0], scales=picked[1], block=(1, self.block[1]))

    def columns(self, begin: int, end: int) -> Scaled:
        width, num_in = self.block[1], self.shape[1]
        if width < num_in and (begin % width or (end % width and end != num_in)):
            raise ValueError(
                f"got inputs {begin} to {end}, want multiples of {width}: they share scales"
            )
        tensor = self.tensor[:, begin:end].contiguous()
        if width >= num_in:
            return replace(self, tensor=tensor, block=(self.block[0], end - begin))
        scales = self.scales[:, begin // width : ceil(end, width)].contiguous()
        return replace(self, tensor=tensor, scales=scales)

    def is_like(self, other: Weight) -> bool:
        return (
            isinstance(other, Scaled)
            and self.tensor.dtype == other.tensor.dtype
            and self.shape[1] == other.shape[1]
            and self.block[1] == other.block[1]
            and self.inputs == other.inputs
        )

    def join(self, below: Scaled) -> Scaled:
        """Blocks stay blocks where the border lies between two of them. Inputs that are rounded
        together have the larger of both scales."""
        found = [each.input_scale for each in (self, below) if each.input_scale is not None]
        both = replace(self, input_scale=max(found, default=None))
        parts = (self.tensor.view(torch.uint8), below.tensor.view(torch.uint8))
        tensor = torch.cat(parts).view(self.tensor.dtype)
        if self.block == below.block and self.shape[0] % self.block[0] == 0:
            return replace(both, tensor=tensor, scales=torch.cat((self.scales, below.scales)))
        scales = torch.cat((self.by_row(), below.by_row()))
        return replace(both, tensor=tensor, scales=scales, block=(1, self.block[1]))

    def _blocks_of(self, rows: slice) -> slice | None:
        """The blocks of some rows, of which the first one is whole or the last of all; None: they
        begin within one, or there are rows between."""
        begin, end, step = rows.indices(self.shape[0])
        if step != 1 or end <= begin or begin % self.block[0]:
            return None
        return slice(begin // self.block[0], ceil(end, self.block[0]))

    def by_row(self) -> Tensor:
        """Scales [out, ceil(in / block[1])]."""
        return self.scales.repeat_interleave(self.block[0], 0)[: self.shape[0]]


def ceil(count: int, size: int) -> int:
    """Stretches of a size that a count is covered by.

    >>> ceil(300, 128)
    3
    """
    return -(-count // size)

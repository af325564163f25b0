"""Whole numbers whose inputs share scales by group, as the weight that kernels know.

Groups may be ragged at the end (576 inputs in groups of 128) or scattered over the inputs (act
order). Blocks are as wide as the stretches that do share a scale; where those are narrower than
any block, the weight comes as floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.quant.coded import Coded
from quire.quant.weight import Dense, Inputs, Weight

_STORED = {1: 2, 2: 2, 3: 4, 4: 4, 5: 5, 6: 6, 7: 8, 8: 8}  # bits that codes are kept in


@dataclass(frozen=True, slots=True)
class Grouped:
    """weight = scale * (code - zero), with the scale and the zero of the input's group."""

    codes: Tensor  # [out, in] uint8
    bits: int  # 1 to 8
    scales: Tensor  # [out, groups] fp16 or fp32
    zeros: Tensor | int  # [out, groups] uint8, or one for all
    groups: Tensor  # [in] int64: the group of each input
    inputs: Inputs = "float"

    def weight(self) -> Weight:
        zeros = self._one_zero()
        order, groups = None, self.groups
        if bool((groups.diff() < 0).any()):
            order = groups.argsort(stable=True)
            groups = groups[order]
        width, bits = _width(groups), _STORED[self.bits]
        block = _block(width, bits, isinstance(zeros, Tensor))
        if block is None:
            return Dense(self._values(), self.inputs)
        of_blocks = groups[::width]
        codes = self.codes if order is None else self.codes[:, order]
        if isinstance(zeros, Tensor):
            zeros = zeros[:, of_blocks].contiguous()
        if bits == 8:
            codes, zeros = _signed(codes, zeros)
        return Coded(
            codes.contiguous(),
            bits,
            block,
            self.scales[:, of_blocks].contiguous(),
            zero=zeros if isinstance(zeros, int) else 0,
            zeros=zeros if isinstance(zeros, Tensor) else None,
            share=width // block,
            order=order,
            inputs=self.inputs,
        )

    def _one_zero(self) -> Tensor | int:
        """One number where zeros are all the same: symmetric weights have them stored too."""
        if isinstance(self.zeros, int):
            return self.zeros
        first = int(self.zeros[0, 0])
        # What signed bytes cannot hold once the zero is taken off needs it beside them.
        fits = _STORED[self.bits] < 8 or 2**self.bits - 128 <= first <= 128
        return first if fits and bool((self.zeros == first).all()) else self.zeros

    def _values(self) -> Tensor:
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros[:, self.groups].float()
        return (self.codes.float() - zeros) * self.scales[:, self.groups].float()


def consecutive(num_in: int, size: int, device: torch.device) -> Tensor:
    """[in]: groups of `size` neighbours; the last may be smaller.

    >>> consecutive(5, 2, torch.device("cpu")).tolist()
    [0, 0, 1, 1, 2]
    """
    return torch.arange(num_in, device=device) // size


def checked_groups(groups: Tensor, num_groups: int, name: str) -> Tensor:
    """The same. Raises CheckpointError where there is no such group."""
    least, most = int(groups.min()), int(groups.max())
    if least < 0 or most >= num_groups:
        raise CheckpointError(
            f"tensor {name} has groups from {least} to {most}, want 0 to {num_groups - 1}"
        )
    return groups


def _width(groups: Tensor) -> int:
    """Inputs that all stretches of one group are multiples of; groups are sorted."""
    borders = (groups.diff().nonzero() + 1).flatten().tolist()
    return math.gcd(len(groups), *borders)


def _block(width: int, bits: int, has_zeros: bool) -> int | None:
    """The larger of those that kernels have for such codes; None: groups are too small."""
    sizes = (16, 32) if bits == 6 or (bits == 2 and has_zeros) else (32, 16)
    return next((size for size in sizes if width % size == 0), None)


def _signed(codes: Tensor, zeros: Tensor | int) -> tuple[Tensor, Tensor | int]:
    """Codes of eight bits are signed, and so are their zeros."""
    if isinstance(zeros, int):
        return codes - zeros, 0  # bytes wrap around
    return codes ^ 128, (zeros ^ 128).view(torch.int8)

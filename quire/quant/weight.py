"""Weight: a matrix [out, in] in the form it is kept in. Floats are a form like the others.

What a form must do: give its values (the reference that kernels are tested against), and give some
of its rows or columns, which is how weights are permuted and shared out. Which kernel multiplies
with it is the device's to say (`quire/ops/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

# How a product takes its inputs: as they are, or rounded to int8 or to floats of eight bits (E4M3).
# A scale is for each row, for every 128 inputs of one, or one for all that was found beforehand.
# "As they are" is up to rounding much finer than the weights' (decision 9). Devices without
# products of eight-bit floats take those inputs as they are; int8 is rounded everywhere.
Inputs = Literal["float", "int8-row", "fp8-row", "fp8-128", "fp8-one"]


class Weight(Protocol):
    @property
    def inputs(self) -> Inputs: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def num_bytes(self) -> int:
        """Of everything that is kept."""
        ...

    def dequantize(self) -> Tensor:
        """[out, in] floats."""
        ...

    def pick(self, rows: Tensor | slice) -> Self:
        """Some rows, or all in another order."""
        ...

    def columns(self, begin: int, end: int) -> Self:
        """Some inputs; borders are those of what shares a scale. Raises ValueError."""
        ...

    def is_like(self, other: Weight) -> bool:
        """Whether the rows of both could be those of one weight."""
        ...

    def join(self, below: Self) -> Self:
        """The rows of both, of forms that are alike."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Floats of any kind."""

    tensor: Tensor  # [out, in]
    inputs: Inputs = "float"

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def dequantize(self) -> Tensor:
        return self.tensor

    def pick(self, rows: Tensor | slice) -> Dense:
        return Dense(self.tensor[rows], self.inputs)

    def columns(self, begin: int, end: int) -> Dense:
        return Dense(self.tensor[:, begin:end], self.inputs)

    def is_like(self, other: Weight) -> bool:
        return (
            isinstance(other, Dense)
            and self.tensor.dtype == other.tensor.dtype
            and self.tensor.shape[1] == other.tensor.shape[1]
            and self.inputs == other.inputs
        )

    def join(self, below: Dense) -> Dense:
        return Dense(torch.cat((self.tensor, below.tensor)), self.inputs)


def tensor_of(weights: Sequence[Weight]) -> Tensor:
    """Parts one below the other as floats; no copy where there is one part of floats."""
    tensors = [weight.dequantize() for weight in weights]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

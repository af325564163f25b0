"""Sparse24: a weight of which every four neighbouring inputs keep two values, with their places.

    9 bits a weight of 16: two values and two places of two bits for every four

What `quire prune --pattern 2:4` writes. The CPU's kernels pick the inputs that the values are for;
a GPU's put the zeros back as they multiply. `dequantize` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.quant.weight import Inputs, Weight

RUN, KEPT = 4, 2


@dataclass(frozen=True, slots=True)
class Sparse24:
    """A weight [out, in]."""

    values: Tensor  # [out, in / 2] floats
    places: Tensor  # [out, in / 4] uint8: where both lie, two bits each, the lower place low
    inputs: Inputs = "float"

    @staticmethod
    def of(weight: Tensor) -> Sparse24:
        """From [out, in] with two zeros or more in every four."""
        runs = weight.view(weight.shape[0], -1, RUN)
        if bool(((runs != 0).sum(-1) > KEPT).any()):
            raise ValueError(f"got {RUN} inputs with more than {KEPT} weights, want 2:4")
        # Zeros last, otherwise in their order; where there are more, the first of them fill up.
        order = (runs == 0).byte().argsort(dim=-1, stable=True)[..., :KEPT].sort(dim=-1).values
        values = runs.gather(-1, order).flatten(1)
        return Sparse24(values, (order[..., 0] | order[..., 1] << 2).byte())

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * RUN // KEPT

    @property
    def num_bytes(self) -> int:
        """Places lie one run to a byte here, and are counted in their bits."""
        return self.values.numel() * self.values.element_size() + self.places.numel() // 2

    def dequantize(self) -> Tensor:
        """[out, in] in the values' own dtype: zeros and all."""
        num_out, num_in = self.shape
        pairs = torch.stack((self.places & 3, self.places >> 2), -1).long()  # [out, runs, 2]
        out = self.values.new_zeros(num_out, num_in // RUN, RUN)
        out.scatter_(-1, pairs, self.values.view(num_out, -1, KEPT))
        return out.view(num_out, num_in)

    def pick(self, rows: Tensor | slice) -> Sparse24:
        return replace(
            self, values=self.values[rows].contiguous(), places=self.places[rows].contiguous()
        )

    def columns(self, begin: int, end: int) -> Sparse24:
        if begin % RUN or end % RUN:
            raise ValueError(
                f"got inputs {begin} to {end}, want multiples of {RUN}: they share two values"
            )
        values = self.values[:, begin // 2 : end // 2].contiguous()
        places = self.places[:, begin // RUN : end // RUN].contiguous()
        return replace(self, values=values, places=places)

    def is_like(self, other: Weight) -> bool:
        return (
            isinstance(other, Sparse24)
            and self.shape[1] == other.shape[1]
            and self.values.dtype == other.values.dtype
            and self.inputs == other.inputs
        )

    def join(self, below: Sparse24) -> Sparse24:
        values = torch.cat((self.values, below.values))
        return replace(self, values=values, places=torch.cat((self.places, below.places)))

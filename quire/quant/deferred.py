"""Deferred: a weight that is not made yet. It has a name and a shape, and knows how to be made.

The loader leaves these in place of weights, so that one product's codes are in memory at a time,
and none where the native library finds the product under its name among what it packed before
(`native/packs.py`). Everything else asks `made` for the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.quant.weight import Inputs, Weight


@dataclass(frozen=True, slots=True)
class Deferred:
    name: str  # of the parameter and its part; no other weight of the model has it
    shape: tuple[int, int]
    make: Callable[[], Weight]  # each time anew: nothing is kept

    @property
    def inputs(self) -> Inputs:
        return self.make().inputs

    @property
    def num_bytes(self) -> int:
        return self.make().num_bytes

    def dequantize(self) -> Tensor:
        return self.make().dequantize()

    def pick(self, rows: Tensor | slice) -> Deferred:
        count = len(range(self.shape[0])[rows]) if isinstance(rows, slice) else len(rows)
        # Which rows follows from the model's config, as the name does.
        shape = (count, self.shape[1])
        return Deferred(f"{self.name}, rows picked", shape, lambda: self.make().pick(rows))

    def columns(self, begin: int, end: int) -> Deferred:
        cut = self.make().columns(begin, end)
        return Deferred(f"{self.name}, inputs {begin} to {end}", cut.shape, lambda: cut)

    def is_like(self, other: Weight) -> bool:
        return self.make().is_like(made(other))

    def join(self, below: Deferred) -> Deferred:
        name, shape = f"{self.name}, {below.name}", (self.shape[0] + below.shape[0], self.shape[1])
        return Deferred(name, shape, lambda: self.make().join(below.make()))


def made(weight: Weight) -> Weight:
    return weight.make() if isinstance(weight, Deferred) else weight


def name_of(weights: Sequence[Weight]) -> str | None:
    """Of parts one below the other; None where one of them has no name."""
    names = [weight.name for weight in weights if isinstance(weight, Deferred)]
    return "\n".join(names) if names and len(names) == len(weights) else None

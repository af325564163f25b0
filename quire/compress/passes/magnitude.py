"""Magnitude: the smallest weights of a matrix go. Needs no text; others must beat it."""

from __future__ import annotations

from torch import Tensor

from quire.compress.passes.prune import Prune
from quire.compress.seen import Seen


class Magnitude(Prune):
    def cut(self, weight: Tensor, seen: Seen | None, module: str) -> Tensor:
        return weight.masked_fill(self.sparsity.in_all(weight.abs()), 0.0)

"""Wanda: of each output, the weights go that add least: |weight| times the norm of its input.

Nothing is moved, nothing is inverted (Sun et al., arXiv 2306.11695).
"""

from __future__ import annotations

from torch import Tensor

from quire.compress.passes.prune import Prune
from quire.compress.seen import Needs, Seen


class Wanda(Prune):
    needs = Needs(rows=True)

    def cut(self, weight: Tensor, seen: Seen | None, module: str) -> Tensor:
        scores = weight.abs()
        if seen is not None and seen.num_tokens:
            scores = scores * seen.energy.sqrt()
        return weight.masked_fill(self.sparsity.in_rows(scores), 0.0)

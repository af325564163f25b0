"""Zeroed: the smaller two of every four neighbouring weights are left out while they are loaded.

What `quire prune --method magnitude --pattern 2:4 --no-reconstruct` writes, without a file. It
shows what 2:4 weights take in time; what they lose, only pruning by text keeps low.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.quant.sparse24 import KEPT, RUN, Sparse24
from quire.quant.weight import Weight


class Zeroed24:
    """Kept values in 16 bits; embeddings and heads stay whole."""

    def of(self, weight: Tensor) -> Weight | None:
        num_out, num_in = weight.shape
        if num_in % RUN or not bool(weight.isfinite().all()):
            return None
        runs = weight.view(num_out, -1, RUN)
        order = runs.abs().argsort(dim=-1, descending=True, stable=True)[..., :KEPT]
        order = order.sort(dim=-1).values
        values = runs.gather(-1, order).flatten(1)
        places = (order[..., 0] | order[..., 1] << 2).byte()
        return Sparse24(values.to(_dtype_of(values)), places)

    def for_heads(self) -> Whole:
        return Whole()


class Whole:
    """As they are stored."""

    def of(self, weight: Tensor) -> Weight | None:
        return None

    def for_heads(self) -> Whole:
        return self


def _dtype_of(values: Tensor) -> torch.dtype:
    """Half precision where that loses nothing."""
    is_half = torch.equal(values.to(torch.float16).float(), values)
    is_brain = torch.equal(values.to(torch.bfloat16).float(), values)
    return torch.float16 if is_half and not is_brain else torch.bfloat16

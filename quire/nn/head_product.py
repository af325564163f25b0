"""HeadProduct: every head of a token times that head's own weight.

As with every Linear, a row's bits do not depend on how many rows there are. On a CPU each head has
a kernel of its own. On CUDA one launch does all heads and reads the weight in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.nn.linear import KernelChoice


class HeadProduct:
    def __init__(self, weight: Tensor, choose: KernelChoice) -> None:
        """`weight` is [heads, out, in] with any strides."""
        self.weight: Tensor | None = weight if weight.is_cuda else None
        self.kernels = [] if weight.is_cuda else [choose(w.contiguous(), None) for w in weight]

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads, in] -> [tokens, heads, out]."""
        if self.weight is not None:
            from quire.kernels.latent_heads import multiply_heads

            return multiply_heads(x, self.weight)
        pieces = [kernel(x[:, i].contiguous()) for i, kernel in enumerate(self.kernels)]
        return torch.stack(pieces, 1)

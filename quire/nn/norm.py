"""RMSNorm and LayerNorm, each with the residual add folded in: (x, residual) -> (normed, sum)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.native.tape import Rows


class RMSNorm:
    """`offset` is added to the weight, in fp32, before it scales (Gemma)."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps, self.offset = eps, offset
        self._sum: Tensor | None = None  # of weight and offset, once the weight is there

    def scale(self) -> Tensor:
        """What the normed row is multiplied by: fp32 where there is an offset. The weight must
        have been loaded."""
        if self.offset == 0.0:
            return self.weight
        if self._sum is None:
            self._sum = self.weight.float() + self.offset
        return self._sum

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if isinstance(x, Rows):
            return x.tape.norm(x, residual, self.scale(), self.eps)
        if x.is_cuda:
            from quire.kernels.rms_norm import rms_norm

            return rms_norm(x, self.scale(), self.eps, residual)
        if residual is not None:
            x = x + residual
        weight = self.scale()
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, self.eps), x
        normed = F.rms_norm(x.float(), weight.shape, None, self.eps)
        if weight.dtype == x.dtype:
            return normed.to(x.dtype) * weight, x
        return (normed * weight).to(x.dtype), x  # rounded once, as Gemma's own


class LayerNorm:
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps), x

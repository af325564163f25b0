"""RMSNorm and LayerNorm, each with the residual add folded in: (x, residual) -> (normed, sum)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class RMSNorm:
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            from quire.kernels.rms_norm import rms_norm

            return rms_norm(x, self.weight, self.eps, residual)
        if residual is not None:
            x = x + residual
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps), x
        normed = F.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return normed.to(x.dtype) * self.weight, x


class LayerNorm:
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps), x

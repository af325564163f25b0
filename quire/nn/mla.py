"""MlaAttention: latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec
from quire.errors import NotSupported
from quire.forward import ForwardContext
from quire.models.spec import ModelSpec
from quire.nn.attention import Ropes
from quire.nn.linear import KernelChoice, Linear
from quire.nn.norm import RMSNorm


class MlaAttention:
    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        raise NotSupported("latent attention is not built yet")

    def linears(self) -> dict[str, Linear]: ...

    def norms(self) -> dict[str, RMSNorm]: ...

    def finish(self, choose: KernelChoice, ropes: Ropes) -> None: ...

    def __call__(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor: ...

"""The feed-forward block: gated (Llama and kin) or plain (GPT-2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.dist.ranks import ALONE, Ranks
from quire.models.spec import ModelSpec
from quire.nn.linear import Adapted, Linear
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.ops import LinearKernel, NormedKernel, Ops


class MLP:
    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        ffn_size: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`ffn_size` for a block of another width than the model's (a shared expert)."""
        hidden, ffn, bias = spec.hidden_size, ffn_size or spec.ffn_size, spec.mlp_bias
        ffn_share = ranks.spread_within(ffn)
        self.passage = ranks.passage(ffn_share, hidden, whole=spec.sub_norms)
        self.is_gated = spec.mlp == "gated"
        own = ffn_share.own
        parts = {"gate": own, "up": own} if self.is_gated else {"up": own}
        self.up = Linear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.down = Linear(
            self.passage.taken,
            {"down": self.passage.made},
            bias=bias and self.passage.has_bias,
            dtype=dtype,
            device=device,
        )
        self.activation = spec.activation
        self.ops: Ops | None = None
        self.both: LinearKernel | None = None  # products, where the device has one kernel of them
        self.sub_norm = None
        if spec.sub_norms:
            self.sub_norm = RMSNorm(ffn, spec.norm_eps, dtype, device, spec.norm_offset)

    def linears(self) -> dict[str, Linear]:
        return {"up": self.up, "down": self.down}

    def norms(self) -> dict[str, RMSNorm]:
        return {} if self.sub_norm is None else {"mlp_sub_norm": self.sub_norm}

    def finish(self, ops: Ops) -> None:
        self.ops = ops
        self.up.finish(ops, gate=self.activation if self.is_gated else None)
        self.down.finish(ops)
        for norm in self.norms().values():
            norm.finish(ops)
        if self.is_gated and self.sub_norm is None and self.passage.is_entered:
            assert self.up.kernel is not None and self.down.kernel is not None
            self.both = ops.chained(self.up.kernel, self.down.kernel)

    def after(self, norm: RMSNorm | LayerNorm) -> NormedKernel | None:
        """A norm and this block in fewer launches, without adapters. None: one after the other is
        as good."""
        rest: Callable[[Tensor], Tensor]
        if self.both is None:
            kernel, rest = norm.into(self.up.kernel), self._from_up
        else:
            kernel, rest = norm.into(self.both), self.passage.leave
        return None if kernel is None else partial(_normed, kernel, rest)

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        if self.both is not None and adapted is None:
            return self.passage.leave(self.both(x))
        return self._from_up(self.up(x, adapted), adapted)

    def _from_up(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        """`x` [tokens, ffn]; a gate has been applied already."""
        if not self.is_gated:
            assert self.ops is not None, "MLP used before finish()"
            x = self.ops.activate(x, self.activation)
        x = self.passage.enter(x)
        if self.sub_norm is not None:
            x, _ = self.sub_norm(x, None)
        return self.passage.leave(self.down(x, adapted))


def _normed(
    kernel: NormedKernel, rest: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    made, stream = kernel(x, residual)
    return rest(made), stream

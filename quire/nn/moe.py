"""SparseMLP: a feed-forward block of many experts, of which a router picks a few for each token.

How the router picks is its rule's (`ops.route`), what experts do with their tokens `experts.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.dist.ranks import ALONE, Ranks
from quire.nn.experts import Experts
from quire.nn.linear import Adapted, Linear
from quire.nn.mlp import MLP
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.ops import GateForm, NormedKernel, Ops
from quire.nn.parameter import Parameter

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec


class SparseMLP:
    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        moe, hidden = spec.moe, spec.hidden_size
        assert moe is not None
        self.rule = moe.router
        # One product gives the experts' scores and the gate of the shared one.
        parts = {"experts": self.rule.num_experts}
        self.has_shared_gate = moe.has_shared_gate
        if moe.has_shared_gate:
            parts["shared"] = 1
        self.router = Linear(hidden, parts, bias=self.rule.bias, dtype=dtype, device=device)
        self.correction: Tensor | None = None  # [experts] f32
        if self.rule.correction:
            self.correction = torch.empty(self.rule.num_experts, device=device)
        gate = GateForm("silu", moe.swiglu_alpha, moe.swiglu_limit)
        sizes = (self.rule.num_experts, hidden, moe.ffn_size)
        self.experts = Experts(*sizes, dtype, device, gate, moe.expert_bias, ranks)
        self.shared: MLP | None = None
        if moe.shared_ffn_size:
            self.shared = MLP(spec, dtype, device, moe.shared_ffn_size, ranks)
        self.ops: Ops | None = None
        self.loads: Tensor | None = None  # [experts] tokens so far, counted when there is one

    def linears(self) -> dict[str, Linear]:
        """The layers that multiply every token, by name."""
        shared = self.shared.linears() if self.shared else {}
        return {"router": self.router, **{f"shared.{name}": of for name, of in shared.items()}}

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor to be filled besides those of the linears, by name."""
        found = {f"experts.{name}": own for name, own in self.experts.parameters.items()}
        if self.correction is not None:
            found["router.correction"] = Parameter.of(self.correction)
        return found

    def finish(self, ops: Ops) -> None:
        self.ops = ops
        self.router.finish(ops)
        if self.shared is not None:
            self.shared.finish(ops)
        self.experts.finish(ops)

    def after(self, norm: RMSNorm | LayerNorm) -> NormedKernel | None:
        """Router and experts both read what is normed."""
        return None

    def __call__(self, x: Tensor, adapted: Adapted | None = None) -> Tensor:
        assert self.ops is not None, "SparseMLP used before finish()"
        scores = self.router(x)  # [tokens, experts (+ 1)]
        visits = self.ops.route(scores[:, : self.rule.num_experts], self.rule, self.correction)
        out = self.experts(x, visits, self.loads)
        if self.shared is None:
            return out
        if not self.has_shared_gate:
            return out + self.shared(x, adapted)
        return self.ops.add_gated(out, scores[:, self.rule.num_experts :], self.shared(x, adapted))

"""SparseMLP: a feed-forward block of many experts, of which a router picks a few for each token.

`choose_experts` is the router's rule, from plain softmax and top-k (Mixtral, Qwen) to DeepSeek's
sigmoid scores with a correction bias and groups; the operations and their dtypes are those of
transformers. What the experts do with their tokens is `experts.py`'s.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.nn.clamped_swiglu import clamped_swiglu
from quire.nn.experts import ExpertForm, Experts, Fused, Gate, Visits
from quire.nn.gate import silu_mul
from quire.nn.linear import KernelChoice, Linear
from quire.nn.mlp import MLP

if TYPE_CHECKING:
    from quire.models.spec import ModelSpec, MoeSpec, RouterSpec


class SparseMLP:
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
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
        form = ExpertForm(gate_of(moe), moe.expert_bias)
        self.experts = Experts(self.rule.num_experts, hidden, moe.ffn_size, dtype, device, form)
        self.shared = MLP(spec, dtype, device, moe.shared_ffn_size) if moe.shared_ffn_size else None
        self.loads: Tensor | None = None  # [experts] tokens so far, counted when there is one

    def linears(self) -> dict[str, Linear]:
        """The layers that multiply every token, by name."""
        shared = self.shared.linears() if self.shared else {}
        return {"router": self.router, **{f"shared.{name}": of for name, of in shared.items()}}

    def parameters(self) -> dict[str, Fused]:
        """Every tensor to be filled besides those of the linears, by name."""
        found = {f"experts.{name}": fused for name, fused in self.experts.parameters().items()}
        if self.correction is not None:
            found["router.correction"] = Fused(self.correction, {})
        return found

    def finish(self, choose: KernelChoice) -> None:
        self.router.finish(choose)
        if self.shared is not None:
            self.shared.finish(choose)
        self.experts.finish(choose)

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x)  # [tokens, experts (+ 1)]
        visits = choose_experts(scores[:, : self.rule.num_experts], self.rule, self.correction)
        out = self.experts(x, visits, self.loads)
        if self.shared is None:
            return out
        if not self.has_shared_gate:
            return out + self.shared(x)
        return out + sigmoid(scores[:, self.rule.num_experts :]) * self.shared(x)


def gate_of(moe: MoeSpec) -> Gate:
    if moe.swiglu_limit is None:
        return silu_mul
    return partial(clamped_swiglu, alpha=moe.swiglu_alpha, limit=moe.swiglu_limit)


def choose_experts(logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> Visits:
    """[tokens, experts] -> the best experts of each token. The correction decides who is best, but
    is no part of the weights."""
    if logits.is_cuda:
        from quire.kernels.route import route

        return Visits(*route(logits, rule, correction))
    if rule.score == "sigmoid":
        scores = sigmoid(logits.float())
    else:
        scores = logits.softmax(-1, dtype=torch.float32)
    choice = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        choice = _in_best_groups(choice, rule)
    experts = choice.topk(rule.top_k, -1).indices
    weights = scores.gather(1, experts)
    if rule.normalize:
        # Column by column: a library sum may take its order from the shape of the batch.
        total = sum(weights.unbind(1)[1:], weights[:, 0])
        weights = weights / (total + 1e-20).unsqueeze(1)
    weights = weights * rule.scale
    return Visits(experts, weights.to(logits.dtype).float() if rule.rounds else weights)


def _in_best_groups(choice: Tensor, rule: RouterSpec) -> Tensor:
    """Scores with the experts of all but the best groups ruled out; a group is worth the sum of
    a few of its best."""
    groups = choice.view(len(choice), rule.num_groups, -1)  # [tokens, groups, experts]
    worth = groups.topk(min(rule.group_best, groups.shape[-1]), -1).values.sum(-1)
    best = worth.topk(rule.top_groups, -1).indices
    is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).view_as(choice)


def sigmoid(x: Tensor) -> Tensor:
    """As a softmax of two, row by row: the library's sigmoid on a CPU takes another exp at the
    end of a tensor, so that bits would depend on a row's place in the batch."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]

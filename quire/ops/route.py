"""A router's rule in torch: which experts a token visits, and with which weights.

From plain softmax and top-k (Mixtral, Qwen) to DeepSeek's sigmoid scores with a correction bias and
groups; the operations and their dtypes are those of transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.nn.ops import Visits

if TYPE_CHECKING:
    from quire.models.spec import RouterSpec


def choose_experts(logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> Visits:
    """[tokens, experts] -> the best experts of each token. The correction decides who is best, but
    is no part of the weights."""
    if rule.score == "sigmoid":
        scores = sigmoid(logits.float())
    else:
        scores = logits.softmax(-1, dtype=torch.float32)
    choice = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        choice = _in_best_groups(choice, rule)
    experts = _best(choice, rule.top_k)
    weights = scores.gather(1, experts)
    if rule.normalize:
        # Column by column: a library sum may take its order from the shape of the batch.
        total = sum(weights.unbind(1)[1:], weights[:, 0])
        weights = weights / (total + 1e-20).unsqueeze(1)
    weights = weights * rule.scale
    return Visits(experts, weights.to(logits.dtype).float() if rule.rounds else weights)


def sigmoid(x: Tensor) -> Tensor:
    """As a softmax of two, row by row: the library's sigmoid on a CPU takes another exp at the
    end of a tensor, so that bits would depend on a row's place in the batch."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _best(values: Tensor, count: int) -> Tensor:
    """Places of the largest, of equals the first: the library's topk leaves that open."""
    return values.sort(stable=True, dim=-1, descending=True).indices[:, :count]


def _in_best_groups(choice: Tensor, rule: RouterSpec) -> Tensor:
    """Scores with the experts of all but the best groups ruled out; a group is worth the sum of
    a few of its best."""
    groups = choice.view(len(choice), rule.num_groups, -1)  # [tokens, groups, experts]
    worth = groups.topk(min(rule.group_best, groups.shape[-1]), -1).values.sum(-1)
    best = _best(worth, rule.top_groups)
    is_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).view_as(choice)

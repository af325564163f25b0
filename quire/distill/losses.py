"""What a pupil is told: how far its distribution is from the teacher's, and how far drafts get.

The loss is the divergence of the pupil's distribution from the teacher's. Accepted drafts are
counted along the texts the target wrote: the draft at depth k counts where the likeliest tokens of
pupil and teacher agree at it and at all depths before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.models.spec import ModelSpec

DEPTH = 4  # drafts that accepted lengths are counted over
VALUES_AT_ONCE = 1 << 27  # of logits in fp32, half a gigabyte


@dataclass(frozen=True, slots=True)
class Judged:
    loss: Tensor  # a number, in the graph
    survived: Tensor  # [depth] rows whose drafts are right up to there, of ...
    num_rows: int  # ... so many

    @property
    def accepted(self) -> float:
        """Drafts a step would accept."""
        return float(self.survived.sum()) / max(1, self.num_rows)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean over rows of KL(teacher, pupil), 0 of none; both are logits [rows, vocab]."""
    target = wanted.float().log_softmax(-1)
    apart = target.exp() * (target - logits.float().log_softmax(-1))
    return apart.sum() / max(1, len(logits))


class Apart(NamedTuple):
    loss: Tensor  # mean over rows of KL(teacher, pupil), 0 of none
    agrees: Tensor  # [rows] whether both find the same token likeliest


def divergence_from(logits: Tensor, teacher: Callable[[slice], Tensor]) -> Apart:
    """Of a pupil's logits [rows, vocab], whose rows the teacher is asked for a few at a time.

    In the end one tensor of that size is held, the gradient, and not the dozen that autograd would.
    """
    return Apart(*_Divergence.apply(logits, teacher))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Callable[[slice], Tensor]
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_tokens = logits.shape
        gradient = torch.empty_like(logits)
        agrees = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
        total = torch.zeros((), device=logits.device)
        step = max(1, VALUES_AT_ONCE // num_tokens)
        for at in range(0, num_rows, step):
            rows = slice(at, min(at + step, num_rows))
            target = teacher(rows).float().log_softmax(-1)
            own = logits[rows].float().log_softmax(-1)
            agrees[rows] = own.argmax(-1) == target.argmax(-1)
            likely = target.exp()
            total += (likely * (target - own)).sum()
            gradient[rows] = (own.exp_() - likely) / num_rows
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agrees)
        return total / max(1, num_rows), agrees

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * given[0].to(gradient.dtype), None


def bent(logits: Tensor, spec: ModelSpec) -> Tensor:
    """Products with a head's rows, scaled and capped as the model's logits are."""
    logits = logits * spec.logit_scale
    cap = spec.logit_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def survival(agrees: Tensor, counts: Tensor, depth: int = DEPTH) -> Tensor:
    """[depth] rows still right, where every draft is the next position's: both [seqs, length].

    >>> agrees = torch.tensor([[True, True, False, True]])
    >>> survival(agrees, torch.ones_like(agrees), 2)
    tensor([3, 1])
    """
    right = agrees & counts
    alive, found = right, []
    for ahead in range(depth):
        if ahead:
            moved = torch.zeros_like(right)
            moved[:, :-ahead] = right[:, ahead:]
            alive = alive & moved
        found.append(alive.sum())
    return torch.stack(found)


def taken(values: Tensor, rows: Tensor) -> Tensor:
    """[seqs, length, ...] -> [rows, ...] of the positions that count."""
    return values.flatten(0, 1).index_select(0, rows)


def spread(values: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """[rows] of the positions that count -> [seqs, length], False elsewhere."""
    made = torch.zeros_like(counts)
    made.view(-1)[rows] = values
    return made


def hidden_distance(own: Tensor, wanted: Tensor) -> Tensor:
    """Mean of 1 - cosine between states [rows, hidden]."""
    return (1 - torch.nn.functional.cosine_similarity(own.float(), wanted, dim=-1)).mean()

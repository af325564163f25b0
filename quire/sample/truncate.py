"""Exact top-k, top-p and min-p, as one cut through tokens ordered by (probability, id).

Each filter keeps the head of that order, so what survives all of them is a head too. Ties in
probability go to the lower id: top_k keeps exactly k tokens (Hugging Face and vLLM keep every token
tied with the k-th) and top_p the fewest tokens whose mass reaches top_p, the one that crosses
included. top_p counts mass among the survivors of min_p and top_k. `kept_tokens` is the CPU's fast
path, `keep_mask` the plain one for any device; the GPU's own is `kernels/sample.py`.

Distance is log(p_max / p) after temperature: 0 for the best token, infinity for a banned one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from quire.params import GREEDY_BELOW

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.gumbel import Floats, Ints
    from quire.sample.inputs import SampleInputs

GROUPS = 128  # a row is folded this many times to bound the distance of its k-th token
BOUND_SLACK = 0.01  # of distance; covers f32 rounding of the estimated bound
FAR = np.float32(3e38)  # farther than any token with a finite logit, nearer than banned ones


@dataclass(frozen=True, slots=True)
class Limits:
    """One row's filters, already resolved against the vocabulary: None means off."""

    top_k: int | None
    top_p: float | None
    min_p: float | None

    @classmethod
    def of(cls, top_k: int, top_p: float, min_p: float, vocab_size: int) -> Limits:
        return cls(
            top_k if 0 < top_k < vocab_size else None,
            top_p if top_p < 1.0 else None,
            min_p if min_p > 0.0 else None,
        )

    @property
    def is_off(self) -> bool:
        return self.top_k is None and self.top_p is None and self.min_p is None


def kept_tokens(distance: Floats, limits: Limits) -> Ints:
    """Ids that survive, ascending; at least one, given that some distance is 0.

    Only tokens near enough to matter are sorted, and only as values (an order of magnitude cheaper
    than sorting ids along): the id order is needed at the edge alone.
    """
    cut, mass = _bound(distance, limits)
    tokens: Ints = np.flatnonzero(distance <= cut)
    near = distance[tokens]
    ordered = np.sort(near)[: limits.top_k]
    num_kept = len(ordered)
    if limits.top_p is not None:
        heads = np.cumsum(np.exp(-ordered), dtype=np.float64)
        target = limits.top_p * (heads[-1] if mass is None else mass)
        num_kept = min(int(np.searchsorted(heads, target)) + 1, num_kept)
    edge = ordered[num_kept - 1]
    keep = near < edge
    num_tied = num_kept - int(np.searchsorted(ordered, edge))
    keep[np.flatnonzero(near == edge)[:num_tied]] = True
    kept: Ints = tokens[keep]
    return kept


def _bound(distance: Floats, limits: Limits) -> tuple[np.float32, float | None]:
    """A distance no survivor exceeds, and the row's mass when top_p counts all of it."""
    cut = FAR
    if limits.min_p is not None:
        cut = min(cut, np.float32(-np.log(limits.min_p)))
    if limits.top_k is not None:
        nearest, width = distance, len(distance) // GROUPS
        if limits.top_k <= width:
            # k groups whose nearest token is within x hold k tokens within x between them.
            nearest = distance[: width * GROUPS].reshape(GROUPS, width).min(axis=0)
        cut = min(cut, np.partition(nearest, limits.top_k - 1)[limits.top_k - 1])
    if limits.top_p is None or limits.top_k is not None or limits.min_p is not None:
        return cut, None
    # Tokens beyond x have at most V * exp(-x) of mass; when that fits in 1 - top_p, none survives.
    mass = float(np.exp(-distance).sum(dtype=np.float64))
    spare = (1.0 - limits.top_p) * mass / len(distance)
    return np.float32(-np.log(spare) + BOUND_SLACK), mass


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """[S, V] any float, [S] -> [S, V] f32. NaN counts as banned, +inf as the largest float."""
    largest = torch.finfo(torch.float32).max
    x = logits.float().nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    best = x.amax(dim=-1, keepdim=True)
    # Greedy rows have no temperature to divide by; their order is all that counts.
    scale = torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    return torch.where(x == -torch.inf, torch.inf, (best - x) / scale)


def keep_mask(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """[S, V] bool: what survives, by one stable sort; no host sync. Greedy rows are not narrowed.

    The oracle of the other two paths, and for callers that want the whole truncated distribution.
    """
    distance = distances(logits, inputs.temperature)  # [S, V]
    ordered, order = distance.sort(dim=-1, stable=True)
    vocab_size = distance.shape[-1]
    top_k = torch.where(inputs.top_k > 0, inputs.top_k, vocab_size)[:, None]
    keep = torch.arange(vocab_size, device=distance.device) < top_k  # [S, V]
    keep &= (ordered <= -inputs.min_p.log()[:, None]) & (ordered < torch.inf)
    mass = torch.where(keep, (-ordered).exp(), 0.0).double()
    head = mass.cumsum(dim=-1)
    top_p = inputs.top_p.double()[:, None]
    keep &= (head - mass < top_p * head[:, -1:]) | (top_p >= 1.0)
    keep |= (inputs.temperature < GREEDY_BELOW)[:, None] & (ordered < torch.inf)
    return torch.zeros_like(keep).scatter_(1, order, keep)

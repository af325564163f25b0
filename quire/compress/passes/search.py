"""Search for the scales of a fold: try some on a few rows of inputs, and fold the best.

Shared by AWQ and SmoothQuant, which differ in what they try and in what rounding costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.folds import Fold
from quire.compress.seen import Seen

LEAST = 1e-4  # of a scale
# (rows [tokens, in], weight [out, in], scale [in]) -> the outputs once both are rounded
Rounded = Callable[[Tensor, Tensor, Tensor], Tensor]


def best_scale(
    fold: Fold,
    tried: Iterable[Tensor],
    block: BlockTensors,
    seen: dict[str, Seen],
    rounded: Rounded,
) -> Tensor | None:
    """Of these and none at all, the one that moves the outputs least; None: none at all."""
    cases = [
        (rows, block.tensors[matrix.name])
        for site in fold.sites
        if site in seen and len(rows := seen[site].rows)
        for matrix in block.at(site)
        if matrix.module not in block.kept
    ]
    if not cases:
        return None
    wanted = [rows @ weight.t() for rows, weight in cases]

    def loss(scale: Tensor) -> float:
        total = 0.0
        for (rows, weight), want in zip(cases, wanted, strict=True):
            total += (rounded(rows, weight, scale) - want).square().sum().item()
        return total

    best, least = None, loss(torch.ones_like(cases[0][0][0]))
    for scale in tried:
        scale = fold.shared(scale)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(LEAST, 1 / LEAST)
        if bool(scale.isfinite().all()) and (found := loss(scale)) < least:
            best, least = scale, found
    return best


def loudest(fold: Fold, seen: dict[str, Seen]) -> Seen | None:
    """Of sites that share their inputs, the one that saw most of them."""
    found = [seen[site] for site in fold.sites if site in seen and seen[site].num_tokens]
    return max(found, key=lambda one: one.num_tokens, default=None)

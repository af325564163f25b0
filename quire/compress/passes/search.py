"""Folding: a pass that searches the scales of folds on a few rows of inputs, and folds the best.

AWQ and SmoothQuant, which differ in what they try (`tried`) and in what rounding costs (`rounded`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.folds import Fold, folds_of
from quire.compress.passes.recipe import Pass
from quire.compress.seen import Needs, Seen
from quire.models.spec import ModelSpec

LEAST = 1e-4  # of a scale


class Folding(Pass):
    needs = Needs(rows=True)

    @abstractmethod
    def tried(self, fold: Fold, block: BlockTensors, heard: Seen) -> Iterable[Tensor]:
        """Scales [in] worth a try for a fold whose sites `heard` these inputs."""

    @abstractmethod
    def rounded(self, rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """Outputs [tokens, out] of rows [tokens, in] and a weight [out, in] once the fold has that
        scale [in] and what is rounded is."""

    def fold(self, block: BlockTensors, seen: dict[str, Seen], spec: ModelSpec) -> None:
        for fold in folds_of(spec, block):
            if (heard := _loudest(fold, seen)) is None:
                continue
            scale = self._best(fold, self.tried(fold, block, heard), block, seen)
            if scale is not None:
                fold.apply(scale, block, seen, spec.norm_offset)

    def _best(
        self, fold: Fold, tried: Iterable[Tensor], block: BlockTensors, seen: dict[str, Seen]
    ) -> Tensor | None:
        """Of these and none at all, the one that moves the outputs least; None: none at all.

        What each matrix loses is a share of its outputs. Queries and keys are larger than values
        and would decide alone otherwise, yet a share of theirs costs attention no more."""
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
        sizes = [want.square().sum().clamp(min=LEAST).item() for want in wanted]

        def loss(scale: Tensor) -> float:
            total = 0.0
            for (rows, weight), want, size in zip(cases, wanted, sizes, strict=True):
                moved = self.rounded(rows, weight, scale) - want
                total += moved.square().sum().item() / size
            return total

        best, least = None, loss(torch.ones_like(cases[0][0][0]))
        for scale in tried:
            scale = fold.shared(scale)
            scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(LEAST, 1 / LEAST)
            if bool(scale.isfinite().all()) and (found := loss(scale)) < least:
                best, least = scale, found
        return best


def _loudest(fold: Fold, seen: dict[str, Seen]) -> Seen | None:
    """Of sites that share their inputs, the one that saw most of them."""
    found = [seen[site] for site in fold.sites if site in seen and seen[site].num_tokens]
    return max(found, key=lambda one: one.num_tokens, default=None)

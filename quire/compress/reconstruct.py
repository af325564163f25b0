"""Reconstruction: weights that were kept are fitted to what the dense model computes.

Pruned and dense blocks run side by side over the same text, each on what its own predecessors made
of it. For every product, in the order inputs meet them, least squares find the kept weights whose
outputs on the pruned model's inputs come nearest to the dense outputs: so `out` makes up for all
that attention lost, and `down` for the feed-forward block. Zeros stay zeros. What an expert is sent
differs between the two, so experts are fitted to the dense weights on their own inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.stream import Stream

ROUNDS = 50  # of conjugate gradients; each is one product with the Hessian
DAMP = 0.01  # of the mean diagonal: how much a weight is held where it was
ENOUGH = 1e-10  # of the squared residual


class Reconstruction:
    def __init__(self, pruned: Stream, dense: Stream) -> None:
        self.pruned, self.dense = pruned, dense

    def fit(
        self, layer: int, block: BlockTensors, matrices: Sequence[Matrix], sites: Iterable[str]
    ) -> None:
        """Moves what `block.changed` keeps of these matrices. The dense stream has its block's
        weights already."""
        for site in sites:
            if not (own := [matrix for matrix in matrices if matrix.site == site]):
                continue
            self.pruned.put(layer, block.tensors | block.changed, block.targets)
            gram, cross = self._grams(layer, site)
            for matrix in own:
                dense, start = block.tensors[matrix.name], block.changed[matrix.name]
                block.changed[matrix.name] = fitted(start, dense @ cross, gram)
        self.pruned.unload(layer)

    def _grams(self, layer: int, site: str) -> tuple[Tensor, Tensor]:
        """[in, in] each: pruned inputs with themselves, and dense ones with them."""
        gram = cross = None
        is_expert = site.startswith("experts.")
        others = self.pruned if is_expert else self.dense
        pairs = zip(others.inputs(layer, site), self.pruned.inputs(layer, site), strict=True)
        for theirs, ours in pairs:
            if gram is None or cross is None:
                gram, cross = (ours.new_zeros(2, ours.shape[1], ours.shape[1])).unbind()
            gram.addmm_(ours.t(), ours)
            cross.addmm_(theirs.t(), ours)
        assert gram is not None and cross is not None
        return gram, cross


def fitted(start: Tensor, wanted: Tensor, gram: Tensor) -> Tensor:
    """[out, in] weights, 0 where `start` is, that solve `weight @ gram = wanted` as nearly as they
    can: least squares of outputs, row by row, held to `start` by a little.

    Conjugate gradients: rows have zeros of their own, so each would need a factor of its own. A
    round never makes a row worse."""
    kept = start != 0
    diagonal = gram.diagonal()
    damp = DAMP * diagonal.mean()
    scale = (diagonal + damp).clamp(min=1e-30)
    found = start.clone()
    left = (wanted - start @ gram) * kept  # damping pulls to the start: nothing yet
    bound = ENOUGH * (left.square() / scale).sum(1, keepdim=True)
    step = left / scale
    size = (left * step).sum(1, keepdim=True)  # [out, 1]
    for _ in range(ROUNDS):
        pulled = (step @ gram + damp * step) * kept
        length = (step * pulled).sum(1, keepdim=True)
        is_moving = (size > bound) & (length > 0)
        if not bool(is_moving.any()):
            break
        rate = torch.where(is_moving, size / length.clamp(min=1e-30), 0.0)
        found += rate * step
        left -= rate * pulled
        next_ = left / scale
        before, size = size, (left * next_).sum(1, keepdim=True)
        step = next_ + torch.where(is_moving, size / before.clamp(min=1e-30), 0.0) * step
    return found

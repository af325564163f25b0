"""SparseGPT: cut one input after the other, and let those to come make up for the error.

As GPTQ rounds, with zero in the place of the nearest code (Frantar and Alistarh, arXiv 2301.00774).
What goes is decided for 128 inputs at a time, or for each run of a pattern when it is reached, from
the weights as they are by then: those whose loss leaves the outputs best off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.hessian import BLOCK, in_turn, inverse_factor
from quire.compress.passes.prune import Prune
from quire.compress.seen import Needs, Seen
from quire.compress.sparsity import Sparsity


class SparseGpt(Prune):
    needs = Needs(rows=True, gram=True)

    def cut(self, weight: Tensor, seen: Seen | None, module: str) -> Tensor:
        assert seen is not None and seen.gram is not None
        is_dead = seen.gram.diagonal() == 0  # inputs that were always 0
        alive = weight.masked_fill(is_dead, 0.0) if seen.num_tokens else weight
        return cut_in_turn(alive, inverse_factor(seen.gram, None, module), self.sparsity)


def cut_in_turn(weight: Tensor, factor: Tensor, sparsity: Sparsity) -> Tensor:
    """[out, in] with zeros; `factor` is that of the inverse Hessian, [in, in] upper."""
    columns = weight.t().contiguous()  # [in, out]: a column is a row here
    size = sparsity.run[1] if sparsity.run else BLOCK
    step = -(-BLOCK // size) * size  # whole runs
    diagonal = factor.diagonal().square().unsqueeze(1)
    goes = torch.empty_like(columns, dtype=torch.bool)

    def settle(j: int) -> Tensor:
        if j % size == 0:  # a run, or all of the block
            some = slice(j, j + size)
            scores = (columns[some].square() / diagonal[some]).t().contiguous()
            goes[some] = sparsity.in_all(scores).t()
        return columns[j].masked_fill(goes[j], 0.0)

    in_turn(columns, factor, settle, step)
    return columns.t().contiguous()

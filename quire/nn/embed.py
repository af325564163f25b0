"""Embedding: a row of numbers for each token, in whatever form the checkpoint has it."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.nn.ops import LinearKernel, Ops, Table
from quire.nn.parameter import Parameter


class Embedding:
    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = Parameter((num_rows, width), dtype, device, can_pack=True)
        self.table: Table | None = None

    def finish(self, ops: Ops) -> None:
        (weight,) = self.weight.weights()
        self.table = ops.table(weight)
        self.weight.release()

    def finish_tied(self, ops: Ops) -> LinearKernel:
        """As `finish`; the weight is the head's as well, whose kernel is returned."""
        (weight,) = self.weight.weights()
        self.table, head = ops.tied(weight)
        self.weight.release()
        return head

    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, width]."""
        assert self.table is not None, "Embedding used before its weight was loaded"
        return self.table(ids)

"""Embedding: a row of numbers for each token, in whatever form the checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from quire.dist.ranks import ALONE, Ranks
from quire.nn.ops import LinearKernel, Ops, Table
from quire.nn.parameter import WHOLE, Kept, Parameter


class Lookup(Protocol):
    """What stands in for a step's ids while a model is recorded (`native/tape.py`)."""

    def look_up(self, make: Callable[[Tensor], Tensor], width: int) -> Tensor: ...


class Embedding:
    def __init__(
        self,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self.own, self.comm = ranks.spread_rows(num_rows).own, ranks.comm
        kept = None if self.own.is_whole else Kept({WHOLE: self.own})
        self.weight = Parameter((self.own.size, width), dtype, device, None, True, kept)
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
        if self.own.is_whole:
            return self.table(ids)
        if isinstance(ids, Tensor):
            return self._merged(ids)
        return cast("Lookup", ids).look_up(self._merged, self.weight.shape[1])

    def _merged(self, ids: Tensor) -> Tensor:
        """Each row from the rank that has it."""
        assert self.table is not None
        places = ids - self.own.begin
        is_own = (places >= 0) & (places < self.own.size)
        rows = self.table(places.clamp(0, self.own.size - 1))
        return self.comm.merge(rows.masked_fill(~is_own[:, None], 0.0))

"""Embedding: a row of numbers for each token. Packed where the checkpoint is, as every Linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.native.linear import NativeLinear
from quire.native.tape import Tape
from quire.nn.linear import KernelChoice
from quire.quant.coded import Coded


class Embedding:
    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(num_rows, width, dtype=dtype, device=device)
        self.width = width
        self.coded: dict[str | None, Coded] = {}  # under None: all rows, packed
        self.packed: NativeLinear | None = None

    def finish(self, choose: KernelChoice) -> None:
        """Weights are in. What is packed serves a tied head as well."""
        if self.coded:
            packed = choose([self.coded[None]], None)
            assert isinstance(packed, NativeLinear)
            self.packed, self.coded = packed, {}
            self.weight = torch.empty(0, self.width)

    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, width]."""
        if isinstance(ids, Tape):  # the ids are each step's own
            return ids.embed(
                self.weight if self.packed is None else self.packed.parts[0], self.width
            )
        return F.embedding(ids, self.weight) if self.packed is None else self.packed.rows(ids)

"""AdaptedGraphs: CUDA graphs of decode steps in which somebody has an adapter.

They are decode graphs (`graphs.py`) that read which rows have which adapter from one place in the
device's memory, so a graph serves any mix. Steps without adapters keep to their own. An adapter of
a larger rank than those before it, or of other products, is beyond what graphs were captured for;
they are captured again.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.lora.bank import AdapterBank
from quire.lora.on_gpu import GpuAdapters
from quire.lora.row_tiles import TILE_WORDS, blocks_of
from quire.lora.step_on_gpu import GpuStep
from quire.nn.linear import Adapted
from quire.runner.adapted import numbers_of
from quire.runner.gather import StepShape
from quire.runner.graphs import Decoded, GraphCache
from quire.runner.rows import RequestRows
from quire.runner.trees import Nodes


class DecodeWith(Protocol):
    def __call__(
        self,
        row_ids: Tensor,
        positions: Tensor,
        max_context: int,
        shares_prefix: bool,
        nodes: Nodes | None = None,
        adapted: Adapted | None = None,
    ) -> Decoded:
        """A decode step."""
        ...


class AdaptedGraphs:
    def __init__(
        self, decode: DecodeWith, bank: AdapterBank, rows: RequestRows, plain: GraphCache
    ) -> None:
        """`plain`: of steps without adapters. They lend their memory."""
        assert bank.on_gpu is not None, "graphs of a CPU"
        self._decode, self._bank, self._rows, self._plain = decode, bank, rows, plain
        self._adapters: GpuAdapters = bank.on_gpu
        shape = (blocks_of(plain.sizes[-1])[-1].last, TILE_WORDS)
        self._tiles = torch.zeros(shape, dtype=torch.int32, device=self._adapters.device)
        self._graphs, self._version = self._new(), self._adapters.version

    def of(self, shape: StepShape) -> GraphCache:
        """Graphs for this step, which must be the next."""
        numbers = numbers_of(self._bank, self._rows, shape)
        if numbers is None:
            return self._plain
        if self._version != self._adapters.version:
            self._graphs, self._version = self._new(), self._adapters.version
        fed = np.repeat(numbers, shape.query_lens)  # a draft is a sequence of its own
        host = torch.from_numpy(self._bank.tiles(fed).tiles)
        host = host.pin_memory() if self._tiles.is_cuda else host
        self._tiles[: len(host)].copy_(host, non_blocking=True)
        return self._graphs

    def step(
        self,
        row_ids: Tensor,
        positions: Tensor,
        max_context: int,
        shares_prefix: bool,
        nodes: Nodes | None = None,
    ) -> Decoded:
        """What a graph captures."""
        blocks = blocks_of(len(row_ids))
        adapted = GpuStep(self._adapters, self._tiles[: blocks[-1].last], blocks)
        return self._decode(row_ids, positions, max_context, shares_prefix, nodes, adapted)

    def _new(self) -> GraphCache:
        plain = self._plain
        made = GraphCache(self.step, plain.sizes[-1], plain.max_context, plain.spare_row)
        made.memory = plain.memory
        return made

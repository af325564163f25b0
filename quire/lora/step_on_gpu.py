"""GpuStep: the adapters of one step's rows on a GPU, as layers see them.

A product that an adapter may add to is asked for its fp32 sums. Beside it one launch multiplies all
rows by their A's, then another adds B's results to the sums, rounds and gates
(`kernels/low_rank_*.py`). Rows without an adapter go along and are only rounded. A graph that is
captured keeps the tiles where they are (`runner/adapted_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from quire.dist.homes import Homes
from quire.kernels.low_rank_expand import low_rank_expand, low_rank_gate
from quire.kernels.low_rank_places import Places
from quire.kernels.low_rank_shrink import low_rank_shrink, room_for_ranks
from quire.lora.on_gpu import GpuAdapters
from quire.lora.row_tiles import Block, RowTiles
from quire.nn.linear import Linear
from quire.nn.ops import SumKernel


class GpuStep:
    """`nn.linear.Adapted`."""

    def __init__(
        self,
        adapters: GpuAdapters,
        tiles: Tensor,
        blocks: tuple[Block, ...],
        tail: Callable[[], RowTiles] | None = None,
    ) -> None:
        """`tiles` [tiles, TILE_WORDS] on the device. `tail`: of rows that a step's tail keeps."""
        self._adapters, self._tiles, self._blocks, self._tail = adapters, tiles, blocks, tail

    @staticmethod
    def of(
        adapters: GpuAdapters, rows: RowTiles, tail: Callable[[], RowTiles] | None = None
    ) -> GpuStep:
        host = torch.from_numpy(rows.tiles)
        if adapters.device.type == "cuda":
            host = host.pin_memory()
        tiles = host.to(adapters.device, non_blocking=True)
        return GpuStep(adapters, tiles, rows.blocks, tail)

    def multiply(self, linear: Linear, x: Tensor) -> Tensor:
        places = self._adapters.places(linear)
        if places is None:
            assert linear.kernel is not None, "Linear used before its weight was loaded"
            return linear.kernel(x)
        width = sum(places.sizes) if linear.gate is None else places.sizes[0]
        out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        for block in self._blocks:
            rows = slice(block.begin, block.end)
            self._add(linear, x[rows], self._tiles[block.first : block.last], places, out[rows])
        return out

    def _add(self, linear: Linear, x: Tensor, tiles: Tensor, places: Places, out: Tensor) -> None:
        h = room_for_ranks(x, places)
        kernel = cast("SumKernel", linear.kernel)
        sums = kernel.sums(x)
        low_rank_shrink(x, tiles, places, h)
        if linear.gate is None:
            low_rank_expand(sums, h, tiles, places, out)
        else:
            form = linear.gate.activation, kernel.pairs
            low_rank_gate(sums, h, tiles, places, out, form)

    def of_tail(self) -> GpuStep:
        assert self._tail is not None, "a tail of a tail"
        return GpuStep.of(self._adapters, self._tail())

    def of_own(self, homes: Homes) -> GpuStep:
        raise AssertionError("ranks have requests of their own on CPUs only")

"""Kernels of adapters compiled for an H200 on any machine: registers, spills, shared memory.

python -m benchmarks.lora_compile        # no GPU needed
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_matmul import become_compiler
from benchmarks.gpu_packed import Built, inspect
from quire.kernels import low_rank_expand as expand
from quire.kernels import low_rank_shrink as shrink
from quire.kernels.low_rank_places import PLACE, TILE_WORDS, Places
from quire.kernels.rehearsal import outline

# Inputs and parts of the products of Llama-3.1-8B; of two equal parts the first is a gate.
PRODUCTS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
ROWS, RANK = 8, 16


class Catching:
    """Stands in for a `Launcher` and compiles what it is asked to launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.made = kernel, None

    def __call__(self, grid: Any, args: Any, options: Any, kind: Any) -> None:
        early = {"EARLY": True, "launch_pdl": True}  # whatever the machine that compiles
        outlines = map(outline, args)
        self.made = self.kernel.warmup(*outlines, grid=grid, **{**options, **early})


def build(num_in: int, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, Built]:
    """By kernel."""
    shrinking = shrink._launch = Catching(shrink._shrink_kernel)
    expanding = expand._launch_expand = Catching(expand._expand_kernel)
    gating = expand._launch_gate = Catching(expand._gate_kernel)
    empty = partial(torch.empty, dtype=dtype)
    table = torch.zeros(33, 128, expand.MOST_PARTS, PLACE.value, dtype=torch.int64)
    places = Places(empty(RANK), table, 0, sizes, RANK)
    tiles, x = torch.zeros(1, TILE_WORDS.value, dtype=torch.int32), empty(ROWS, num_in)
    h, sums = shrink.room_for_ranks(x, places), _sums(sizes)
    shrink.low_rank_shrink(x, tiles, places, h)
    if len(sizes) == 2:
        out = empty(ROWS, sizes[0])
        expand.low_rank_gate(sums, h, tiles, places, out, ("silu", True))
        return {"shrink": inspect(shrinking.made), "gate": inspect(gating.made)}
    expand.low_rank_expand(sums, h, tiles, places, empty(ROWS, sum(sizes)))
    return {"shrink": inspect(shrinking.made), "expand": inspect(expanding.made)}


def _sums(sizes: tuple[int, ...]) -> Tensor:
    return torch.empty(ROWS, sum(sizes))


def main() -> int:
    become_compiler()
    spilled = 0
    for dtype in (torch.bfloat16, torch.float16):
        for num_in, sizes in PRODUCTS:
            for name, made in build(num_in, sizes, dtype).items():
                print(f"{dtype} {num_in} -> {sizes} {name}: {made}", flush=True)
                spilled += made.spilled
    return 1 if spilled else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Products with packed weights: y = x @ w.T + bias with w unpacked on its way to the matrix unit.

The bits are those of `matmul.py` with the expanded weight (`packed_kernel.py`), so steps of many
rows may expand the weight into scratch and take any product of those bits (`expand.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quire.kernels.early import early_options
from quire.kernels.launch import Launcher, alignments, ceil_div
from quire.kernels.packed_kernel import packed_kernel
from quire.kernels.rehearsal import outline
from quire.kernels.slabs import SlabForm, Slabs

__all__ = [
    "PackedCall",
    "PackedTile",
    "multiprocessors",
    "packed_matmul",
    "pick_packed",
    "plan_packed",
    "unroll_of",
]


@dataclass(frozen=True, slots=True)
class PackedTile:
    """One way to lay the product on the chip. Every tile gives the same bits."""

    block_m: int  # rows of x per program
    block_n: int  # rows of w; 64 at least, or an older instruction rounds otherwise
    num_stages: int
    num_warps: int
    portion: int  # rows of w that a program has, up to block_n


_launch = Launcher(packed_kernel)

_STEP = 128  # inputs that a step of the loop takes at least, where the weight allows it
_PER_WORD = {"f16": 2, "bf16": 2, "s6": 16}
_PER_WORD |= dict.fromkeys(("u8", "s8", "power", "power128", "u4", "e4m3 times", "e4m3 over"), 4)


def pick_packed(m: int, n: int, num_units: int) -> PackedTile:
    """For m rows of x and n of w; where n is small, all multiprocessors share it. `num_units`: how
    many there are."""
    block_m = next(size for size in (16, 32, 64, 128) if m <= size or size == 128)
    stages = {16: 6, 32: 5, 64: 4, 128: 3}[block_m]
    portion = 64
    if m <= block_m and ceil_div(n, 64) < num_units:
        portion = min(64, max(16, ceil_div(n, num_units)))
        portion += portion % 2  # gates come in pairs
    return PackedTile(block_m, 64, stages, 4, portion)


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A launch with its tensors, ready to run, or to compile ahead of the first run."""

    grid: tuple[int, int, int]
    args: tuple[object, ...]
    options: Mapping[str, object]
    kind: tuple[object, ...]

    def run(self) -> None:
        _launch(self.grid, self.args, self.options, self.kind)

    def compile(self) -> object:
        return packed_kernel.warmup(*map(outline, self.args), grid=self.grid, **self.options)


def packed_matmul(
    x: Tensor,
    slabs: Slabs,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    tile: PackedTile | None = None,
    *,
    gate: str | None = None,
) -> Tensor:
    """x [m, k] -> [m, n] in x's dtype, gated [m, n / 2]. `out` may be some columns of a tensor; in
    fp32 it gets the sums."""
    m, n = len(x), slabs.shape[0]
    if out is None:
        out = torch.empty(m, n // 2 if gate else n, dtype=x.dtype, device=x.device)
    if m > 0:
        tile = tile or pick_packed(m, n, multiprocessors(x.device))
        plan_packed(x, slabs, bias, out, tile, gate).run()
    return out


def plan_packed(
    x: Tensor,
    slabs: Slabs,
    bias: Tensor | None,
    out: Tensor,
    tile: PackedTile,
    gate: str | None = None,
) -> PackedCall:
    """The launch behind `packed_matmul`."""
    (m, k), (n, num_in) = x.shape, slabs.shape
    assert k == num_in and x.stride(1) == 1, f"got x {tuple(x.shape)}, w {slabs.shape}"
    assert gate is None or slabs.paired, "rows of a gated weight come in pairs"
    unroll = unroll_of(slabs.form)
    strides = (x.stride(0), out.stride(0))
    return PackedCall(
        grid=(ceil_div(n, tile.portion), ceil_div(m, tile.block_m), 1),
        args=(
            *(x, *slabs.tensors, bias, out),
            *(m, n, k, slabs.num_scale_rows, *strides, tile.portion),
        ),
        options={
            **slabs.constants,
            "PAIRED": slabs.paired,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "UNROLL": unroll,
            "TAIL": ceil_div(k, slabs.form.slab) % unroll != 0,
            "EVEN_K": k % slabs.form.slab == 0,
            "HAS_BIAS": bias is not None,
            "GATE": gate or "",
            **early_options(next_has_inputs=out.dtype == torch.float32),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
        kind=(
            *(x.dtype, out.dtype, None if bias is None else bias.dtype, strides),
            *(*slabs.kind, alignments(x, bias, out)),
        ),
    )


def unroll_of(form: SlabForm) -> int:
    """Slabs of a step: as few as make it long enough, and words of scales whole."""
    kinds = () if form.offsets == "f16" or form.zeros == "u16" else (form.scales, form.zeros)
    per = max((_PER_WORD.get(kind, 1) for kind in kinds), default=1)
    need = max(_STEP, per * form.group)
    return next((u for u in (1, 2, 4) if u * form.slab >= need), 1)


@cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

"""Packed weights as floats: all rows into scratch, or those of some tokens (`embed_packed`).

The numbers are the ones that products unpack (`unpack.py`). Scratch is one piece of memory for all
layers: a kernel that fills it must wait until the product before has read it, as every kernel of an
early chain does, and no kernel may read it before its own wait (`early.py`). So `stream_matmul.py`,
which asks for weights before its wait, never multiplies with scratch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments, ceil_div
from quire.kernels.slabs import Slabs
from quire.kernels.unpack import in_order, weight_field
from quire.kernels.unpack_scales import above_rows

__all__ = ["Scratch", "embed_packed", "expand"]

_BLOCK = 32  # rows of a program


@triton.jit(do_not_specialize=["count"])
def _expand_kernel(
    out,  # [count, K]
    ids,  # [count] rows of the weight, or None: all of them
    codes, scales, supers, offsets, zeros, values,  # of `Slabs`
    count, N, K, num_scale_rows,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    FIELDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    LANES: tl.constexpr, PLAIN: tl.constexpr, PAIRED: tl.constexpr, HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = places < count
    if HAS_IDS:
        rows = tl.load(ids + places, mask=live, other=0).to(tl.int32)
    else:
        rows = tl.minimum(places, N - 1)
    slab = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    if SCALES == "e4m3 times" or SCALES == "e4m3 over":
        supers = above_rows(supers, rows)
    tensors = (codes, scales, supers, offsets, zeros)
    for f in tl.static_range(FIELDS):
        weight = weight_field(
            tensors, values, rows, slab, 0, f, N, num_scale_rows,
            KIND, LOW, HIGH, WIDTH, GROUP, ROWS, PAIRED, 1,
            SCALES, OFFSETS, SUPER, ZERO, ZEROS, LANES, PLAIN, out.dtype.element_ty,
        )  # fmt: skip
        k = (slab * FIELDS + f) * WIDTH + columns
        cells = out + places.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(cells, in_order(weight, KIND, LANES), mask=live[:, None] & (k < K)[None, :])


_launch = Launcher(_expand_kernel)


def expand(slabs: Slabs, out: Tensor) -> Tensor:
    """All rows into out [n, k], their columns in the order of the slabs."""
    return _fill(slabs, None, out)


def embed_packed(slabs: Slabs, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens] -> [tokens, k]. A plain launch: an early chain may begin behind it."""
    k = slabs.shape[1]
    return _fill(slabs, ids, torch.empty(len(ids), k, dtype=dtype, device=ids.device))


def _fill(slabs: Slabs, ids: Tensor | None, out: Tensor) -> Tensor:
    count, k = out.shape
    assert k == slabs.shape[1] and out.is_contiguous(), f"got {tuple(out.shape)}, {slabs.shape}"
    if count == 0:
        return out
    _launch(
        (ceil_div(count, _BLOCK), ceil_div(k, slabs.form.slab), 1),
        (out, ids, *slabs.tensors, count, *slabs.shape, slabs.num_scale_rows),
        {
            **slabs.constants,
            "PAIRED": slabs.paired,
            "HAS_IDS": ids is not None,
            "BLOCK": _BLOCK,
            **(early_options() if ids is None else {"EARLY": False}),
            "num_warps": 4,
        },
        (*slabs.kind, out.dtype, None if ids is None else ids.dtype, alignments(out, ids)),
    )
    return out


class Scratch:
    """Memory for one expanded weight, shared by all layers; grows while they are made."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def reserve(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        held = self._memory
        if held is None or held.numel() < num_elements:
            self._memory = None  # let go of the old one first
            self._memory = torch.empty(num_elements, dtype=dtype, device=device)

    def view(self, shape: tuple[int, int]) -> Tensor:
        assert self._memory is not None, "scratch used before any was reserved"
        return self._memory[: shape[0] * shape[1]].view(shape)

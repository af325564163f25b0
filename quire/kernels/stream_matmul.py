"""Matmul of few rows on Hopper: weights stream through shared memory, the first of them early.

A product of few rows takes as long as reading its weight. Other kernels that start early wait for
the kernel before and only then begin to read. Here a program first asks the copy engine for its
first tiles of the weight, which no kernel of the step writes, and waits after that. So the memory
stays busy through the norms and attention between products. The sum is that of `matmul_kernel.py`,
one chain of fp32 matrix-unit additions over increasing k, so the bits are the same. Sizes are
chosen in `stream_configs.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.chip import chip_of
from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.hopper_caches import BAND
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind
from quire.kernels.rehearsal import Memory
from quire.kernels.silu_mul import activated
from quire.kernels.stream_configs import MOST_ROWS, StreamConfig, boxes_of, pick_stream

__all__ = ["StreamMatmul", "ask_weight", "store_tile"]


@gluon.jit
def _make_ring(
    w, w_rest, STAGES: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
):  # fmt: skip
    """(boxes of w, boxes of w_rest, tiles of x, tiles of w, one barrier for each stage).

    The boxes and the tiles of w are the same memory."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    deep: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    CELLS: gl.constexpr = STAGES * TILE * BLOCK_K
    BOX: gl.constexpr = w.block_shape
    REST: gl.constexpr = w_rest.block_shape
    boxes = gl.allocate_shared_memory(
        w.dtype, [CELLS // (BOX[1] * BOX[2]), 1, BOX[1], BOX[2]], deep
    )
    rests = boxes._reinterpret(w.dtype, [CELLS // (REST[1] * REST[2]), 1, REST[1], REST[2]], deep)
    tiles = boxes._reinterpret(w.dtype, [STAGES, TILE, BLOCK_K], flat)
    x_tiles = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_M, BLOCK_K], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    return boxes, rests, x_tiles, tiles, ready


@gluon.jit
def ask_weight(w, ring, tile, stage, k, BLOCK_K: gl.constexpr, BYTES: gl.constexpr):
    """Ask for a tile of the weight as [programs, rows, k]: one or two boxes in every band.

    Boxes may be lower than the tile. The matrix units then multiply stale memory below them, and
    those results are never stored. BYTES is all that the stage waits for."""
    first, rest = w
    first_boxes, rest_boxes, _, tiles, ready = ring
    TILE: gl.constexpr = tiles.shape[1]
    done = ready.index(stage)
    mbarrier.expect(done, BYTES)
    HEIGHT: gl.constexpr = first.block_shape[1]
    REST: gl.constexpr = rest.block_shape[1]
    BOX_K: gl.constexpr = first.block_shape[2]
    BANDS: gl.constexpr = BLOCK_K // BOX_K
    for band in gl.static_range(BANDS):
        at = stage * BANDS + band
        place = first_boxes.index(at * (TILE // HEIGHT))
        tma.async_copy_global_to_shared(first, [tile, 0, k + band * BOX_K], done, place)
        if REST < HEIGHT:
            place = rest_boxes.index(at * (TILE // REST) + HEIGHT // REST)
            tma.async_copy_global_to_shared(rest, [tile, HEIGHT, k + band * BOX_K], done, place)


@gluon.jit
def _ask_inputs(x, ring, m_start, stage, k):
    _, _, x_tiles, _, ready = ring
    tma.async_copy_global_to_shared(x, [m_start, k], ready.index(stage), x_tiles.index(stage))


@gluon.jit
def store_tile(
    total, y, bias, m_start, n_start, M, stride_ym,
    ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Bias in fp32, one rounding, the gate if there is one: the epilogue of `matmul_kernel.py`."""
    BLOCK_N: gl.constexpr = total.shape[0]
    BLOCK_M: gl.constexpr = total.shape[1]
    if HAS_BIAS:
        row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, total.type.layout))
        total += gl.load(bias + n_start + row, mask=row < ROWS, other=0.0).to(gl.float32)[:, None]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    rounded = gl.convert_layout(total.to(y.dtype.element_ty).trans(), wide)  # [BLOCK_M, BLOCK_N]
    PAIR: gl.constexpr = 1 if GATE == "" else 2  # weight rows of one output
    if GATE != "":
        gate, up = rounded.reshape([BLOCK_M, BLOCK_N // 2, 2]).split()
        rounded = (activated(gate, GATE) * up.to(gl.float32)).to(rounded.dtype)
    layout: gl.constexpr = rounded.type.layout
    m = m_start + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    n = gl.arange(0, BLOCK_N // PAIR, gl.SliceLayout(0, layout))
    cells = y + m.to(gl.int64)[:, None] * stride_ym + (n_start // PAIR + n)[None, :]
    gl.store(cells, rounded, mask=(m < M)[:, None] & (n < ROWS // PAIR)[None, :])


@gluon.jit(do_not_specialize=["M"])
def stream_matmul_kernel(
    x,  # descriptor of [M, K], a box [BLOCK_M, BLOCK_K]
    w, w_rest,  # descriptors of [N / ROWS, ROWS, K]
    bias, y, M, K, stride_ym,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    M_TILES: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATE: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    tile = gl.program_id(0) // M_TILES  # programs of one weight tile are neighbours: L2 shares it
    m_start = gl.program_id(0) % M_TILES * BLOCK_M
    ring = _make_ring(w, w_rest, STAGES, TILE, BLOCK_M, BLOCK_K)
    HAS_REST: gl.constexpr = w_rest.block_shape[1] < w.block_shape[1]
    OF_BAND: gl.constexpr = w.block_type.nbytes + (w_rest.block_type.nbytes if HAS_REST else 0)
    OF_TILE: gl.constexpr = OF_BAND * (BLOCK_K // w.block_shape[2])
    BYTES: gl.constexpr = OF_TILE + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        ask_weight((w, w_rest), ring, tile, i, i * BLOCK_K, BLOCK_K, BYTES)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            ask_weight((w, w_rest), ring, tile, i, i * BLOCK_K, BLOCK_K, BYTES)
        _ask_inputs(x, ring, m_start, i, i * BLOCK_K)

    _, _, x_tiles, w_tiles, ready = ring
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    total = gl.zeros([TILE, BLOCK_M], gl.float32, of_total)
    for i in range(K // BLOCK_K):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        x_tile = x_tiles.index(stage).permute([1, 0])
        total = warpgroup_mma(w_tiles.index(stage), x_tile, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=[total])  # the product before: its stage is free
        k = (i - 1 + STAGES) * BLOCK_K
        if (i > 0) & (k < K):
            free = (i - 1) % STAGES
            ask_weight((w, w_rest), ring, tile, free, k, BLOCK_K, BYTES)
            _ask_inputs(x, ring, m_start, free, k)
    total = warpgroup_mma_wait(0, deps=[total])
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_ym, ROWS, HAS_BIAS, GATE, num_warps)


_launch = Launcher(stream_matmul_kernel)


class StreamMatmul:
    """Products by one contiguous weight of 16-bit floats, aligned to 16 bytes as the copy engine
    wants it. Only where `has_hopper_kernels`."""

    def __init__(self, w: Tensor, bias: Tensor | None, gate: str | None) -> None:
        self.w, self.bias, self.gate, self.chip = w, bias, gate, chip_of(w.device)
        self._boxes: dict[tuple[int, ...], tuple[TensorDescriptor, TensorDescriptor]] = {}
        # Weights are read before the wait, so what wrote them must be over by the first call.
        torch.cuda.current_stream(w.device).synchronize()

    def pick(self, m: int) -> StreamConfig | None:
        """The config for m rows; None: this kernel does not take them."""
        if m > MOST_ROWS:
            return None
        return pick_stream(m, *self.w.shape, self.gate is not None, self.chip)

    def __call__(self, x: Tensor, out: Tensor, config: StreamConfig) -> None:
        """x [m, k] -> out [m, n], gated [m, n / 2]. An fp32 `out` [m, n] gets the sums, ungated."""
        (m, k), n = x.shape, self.w.shape[0]
        gate = self.gate if out.dtype == x.dtype else None
        assert x.dtype == self.w.dtype and k == self.w.shape[1], f"{x.dtype=} {x.shape=}"
        assert x.is_contiguous() and out.stride(1) == 1, f"{x.stride()=} {out.stride()=}"
        assert n % config.rows == 0 and k % config.block_k == 0, f"{n=} {k=} {config=}"
        # Every copy must be waited for, or it outlives the program; one stage is always in use.
        num_tiles = k // config.block_k
        assert min(2, num_tiles) <= config.num_stages <= num_tiles, f"{k=} {config=}"
        m_tiles = ceil_div(m, config.block_m)
        box = [config.block_m, config.block_k]
        rows = TensorDescriptor(
            Memory(x.data_ptr(), x.dtype), [m, k], [k, 1], box, gl.NVMMASharedLayout(128, 16)
        )
        _launch(
            (n // config.rows * m_tiles, 1, 1),
            (rows, *self._described(config), self.bias, out, m, k, out.stride(0)),
            {
                "ROWS": config.rows,
                "TILE": config.tile,
                "BLOCK_M": config.block_m,
                "BLOCK_K": config.block_k,
                "M_TILES": m_tiles,
                "STAGES": config.num_stages,
                "AHEAD": config.num_ahead,
                "HAS_BIAS": self.bias is not None,
                "GATE": gate or "",
                **early_options(next_has_inputs=out.dtype != x.dtype),
                "num_warps": min(8, config.tile // 16),  # a warpgroup for 64 or 128 rows
            },
            (
                x.dtype, out.dtype, None if self.bias is None else self.bias.dtype, n, k,
                alignments(out, self.bias), int_kind(out.stride(0)),
            ),
        )  # fmt: skip

    def _described(self, config: StreamConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
        key = (config.rows, config.tile, config.block_k)
        found = self._boxes.get(key)
        if found is None:
            first, rest = boxes_of(config.rows)
            # A box as high as the tile takes all of its bands at once.
            width = config.block_k if first == config.tile else BAND.value
            found = self._boxes[key] = (
                self._describe(config.rows, first, width),
                self._describe(config.rows, rest or first, width),
            )
        return found

    def _describe(self, rows: int, height: int, width: int) -> TensorDescriptor:
        """Each program's rows are a plane of their own, so a box cannot reach into the next one."""
        n, k = self.w.shape
        return TensorDescriptor(
            Memory(self.w.data_ptr(), self.w.dtype),
            [n // rows, rows, k],
            [rows * k, k, 1],
            [1, height, width],
            gl.NVMMASharedLayout(128, 16, rank=3),
        )

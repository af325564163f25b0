"""Products of few rows, eight bits by eight, on Hopper: weights stream through shared memory.

`stream_matmul.py` with bytes: a program asks for the first tiles of its weight rows before the
inputs are there. A band is 128 inputs, 128 bytes of every row: the span of the copy engine's
swizzle and one chain of the matrix unit. Floats of a band are summed from zero and then added in
fp32, so the bits are those of `eight_bit_matmul.py`; whole numbers are exact anyway. The matrix
unit works on all bands of a stage at once, each with registers of its own.
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
from quire.kernels.eight_bit_configs import pick_eight_bit_stream
from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight, scale_row
from quire.kernels.launch import Launcher, alignments, ceil_div
from quire.kernels.rehearsal import Memory
from quire.kernels.round_inputs import RoundedRows
from quire.kernels.stream_configs import StreamConfig, boxes_of
from quire.kernels.stream_matmul import ask_weight, store_tile

__all__ = ["StreamEightBit"]

BAND = gl.constexpr(CHAIN)


@gluon.jit
def _make_ring(
    x, w, w_rest, STAGES: gl.constexpr, BANDS: gl.constexpr, TILE: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """As that of `stream_matmul.py`, and the tiles of x, which are the memory of its boxes. Of both
    operands there is a tile for every band."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    deep: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=3)
    ROWS: gl.constexpr = STAGES * BANDS * TILE
    HEIGHT: gl.constexpr = w.block_shape[1]
    REST: gl.constexpr = w_rest.block_shape[1]
    boxes = gl.allocate_shared_memory(w.dtype, [ROWS // HEIGHT, 1, HEIGHT, BAND], deep)
    rests = boxes._reinterpret(w.dtype, [ROWS // REST, 1, REST, BAND], deep)
    tiles = boxes._reinterpret(w.dtype, [STAGES * BANDS, TILE, BAND], flat)
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BANDS * BAND], flat)
    x_tiles = x_boxes._reinterpret(x.dtype, [STAGES * BANDS, BLOCK_M, BAND], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    return (boxes, rests, x_boxes, tiles, ready), x_tiles


@gluon.jit
def _ask_inputs(x, ring, m_start, stage, k):
    _, _, x_boxes, _, ready = ring
    tma.async_copy_global_to_shared(x, [m_start, k], ready.index(stage), x_boxes.index(stage))


@gluon.jit
def _begin(
    x, w, ring, tile, m_start, STAGES: gl.constexpr, AHEAD: gl.constexpr, BANDS: gl.constexpr,
    BYTES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Ask for all stages, the first ones' weights before the inputs are there."""
    BLOCK_K: gl.constexpr = BANDS * BAND
    for i in gl.static_range(AHEAD):
        ask_weight(w, ring, tile, i, i * BLOCK_K, BLOCK_K, BYTES)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            ask_weight(w, ring, tile, i, i * BLOCK_K, BLOCK_K, BYTES)
        _ask_inputs(x, ring, m_start, i, i * BLOCK_K)


@gluon.jit
def _scaled(part, band, scales, x_scales, place, GROUP: gl.constexpr):
    """The sum of one band times the scales of its group, where scales change along k."""
    if GROUP > 0:
        of_scale, m, live_m, scale_stride, num_groups = place
        group = band * BAND // GROUP
        w_scale = gl.load(scales + group * scale_stride + of_scale)
        x_scale = gl.load(x_scales + m * num_groups + group, mask=live_m, other=0.0)
        part = part * (w_scale[:, None] * x_scale[None, :])
    return part


@gluon.jit
def _add_whole(total, both, at, BANDS: gl.constexpr):
    """The total with a stage's bands of whole numbers. All is over when this returns."""
    x_tiles, tiles = both
    for band in gl.static_range(BANDS):
        x_tile = x_tiles.index(at + band).permute([1, 0])
        total = warpgroup_mma(tiles.index(at + band), x_tile, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def _add_floats(
    total, parts, both, at, first, scales, x_scales, place, BANDS: gl.constexpr, GROUP: gl.constexpr
):
    """The same of floats: every band from zero. `parts`: one tile of no meaning."""
    x_tiles, tiles = both
    for band in gl.static_range(BANDS):
        x_tile = x_tiles.index(at + band).permute([1, 0])
        made = warpgroup_mma(tiles.index(at + band), x_tile, parts[0], use_acc=False, is_async=True)
        parts += (made,)
    for band in gl.static_range(BANDS):
        made = warpgroup_mma_wait(BANDS - 1 - band, deps=[parts[1 + band]])
        total = total + _scaled(made, first + band, scales, x_scales, place, GROUP)
    return total


@gluon.jit(do_not_specialize=["M"])
def stream_eight_bit_kernel(
    x, w, w_rest,  # descriptors of [M, K], boxes [BLOCK_M, BANDS * BAND], and [N / ROWS, ROWS, K]
    x_scales, scales, bias, y, M, N, K, num_groups, scale_stride,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr, BANDS: gl.constexpr,
    M_TILES: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, GROUP: gl.constexpr,
    SHARED: gl.constexpr, PAIRED: gl.constexpr,  # how many weight rows have one scale
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    tile = gl.program_id(0) // M_TILES  # programs of one weight tile are neighbours: L2 shares it
    m_start = gl.program_id(0) % M_TILES * BLOCK_M
    ring, x_tiles = _make_ring(x, w, w_rest, STAGES, BANDS, TILE, BLOCK_M)
    BLOCK_K: gl.constexpr = BANDS * BAND
    HAS_REST: gl.constexpr = w_rest.block_shape[1] < w.block_shape[1]
    OF_REST: gl.constexpr = w_rest.block_type.nbytes if HAS_REST else 0
    BYTES: gl.constexpr = (w.block_type.nbytes + OF_REST) * BANDS + x.block_type.nbytes
    _begin(x, (w, w_rest), ring, tile, m_start, STAGES, AHEAD, BANDS, BYTES, EARLY)
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 32])
    IS_INT: gl.constexpr = x.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if IS_INT else gl.float32
    total = gl.zeros([TILE, BLOCK_M], SUM, of_total)
    nothing = (gl.zeros([TILE, BLOCK_M], SUM, of_total),)
    row = gl.arange(0, TILE, gl.SliceLayout(1, of_total))
    m = m_start + gl.arange(0, BLOCK_M, gl.SliceLayout(0, of_total))
    # Rows of others read our last one's scale: never stored.
    of_scale = scale_row(tile * ROWS + gl.minimum(row, ROWS - 1), N, SHARED, PAIRED)
    place = (of_scale, m, m < M, scale_stride, num_groups)
    if GROUP == 0:  # asked for now, needed at the end
        x_scale = gl.load(x_scales + m, mask=m < M, other=0.0)
        w_scale = gl.load(scales + tile * ROWS + row, mask=row < ROWS, other=0.0)
    both = (x_tiles, ring[3])
    for i in range(K // BLOCK_K):
        stage = i % STAGES
        mbarrier.wait(ring[4].index(stage), i // STAGES & 1)
        if IS_INT:
            total = _add_whole(total, both, stage * BANDS, BANDS)
        else:
            total = _add_floats(
                total, nothing, both, stage * BANDS, i * BANDS, scales, x_scales, place,
                BANDS, GROUP,
            )  # fmt: skip
        k = (i + STAGES) * BLOCK_K
        if k < K:
            ask_weight((w, w_rest), ring, tile, stage, k, BLOCK_K, BYTES)
            _ask_inputs(x, ring, m_start, stage, k)
    total = total.to(gl.float32)
    if GROUP == 0:
        total = (total * w_scale[:, None]) * x_scale[None, :]
    stride_y = N if GATE == "" else N // 2
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_y, ROWS, HAS_BIAS, GATE, num_warps)


_launch = Launcher(stream_eight_bit_kernel)


class StreamEightBit:
    """Products by one contiguous weight, aligned to 16 bytes as the copy engine wants it, whose
    inputs fill bands. Only where `has_hopper_kernels`."""

    def __init__(self, weight: EightBitWeight, bias: Tensor | None, gate: str | None) -> None:
        self.weight, self.bias, self.gate = weight, bias, gate
        self.chip = chip_of(weight.codes.device)
        self._boxes: dict[tuple[int, ...], tuple[TensorDescriptor, TensorDescriptor]] = {}
        # Weights are read before the wait, so what wrote them must be over by the first call.
        if weight.codes.is_cuda:  # else it is compiled for a machine elsewhere
            torch.cuda.current_stream(weight.codes.device).synchronize()

    def pick(self, m: int) -> StreamConfig | None:
        """The config for m rows; None: this kernel does not take them."""
        return pick_eight_bit_stream(m, *self.weight.shape, self.chip)

    def __call__(self, x: RoundedRows, out: Tensor, config: StreamConfig) -> None:
        """x [m, k] -> out [m, n], gated [m, n / 2]."""
        (m, k), n = x.codes.shape, self.weight.shape[0]
        assert x.codes.dtype == self.weight.codes.dtype and k == self.weight.shape[1], f"{k=}"
        assert out.is_contiguous() and n % config.rows == 0 and k % config.block_k == 0
        # Every copy must be waited for, or it outlives the program.
        assert config.num_stages <= k // config.block_k, f"{k=} {config=}"
        m_tiles = ceil_div(m, config.block_m)
        rows = TensorDescriptor(
            Memory(x.codes.data_ptr(), x.codes.dtype),
            [m, k],
            [k, 1],
            [config.block_m, config.block_k],
            gl.NVMMASharedLayout(128, 8),
        )
        scales, num_groups = self.weight.scales, x.scales.shape[1]
        _launch(
            (n // config.rows * m_tiles, 1, 1),
            (
                *(rows, *self._described(config), x.scales, scales, self.bias, out),
                *(m, n, k, num_groups, scales.shape[1]),
            ),
            {
                "ROWS": config.rows,
                "TILE": config.tile,
                "BLOCK_M": config.block_m,
                "BANDS": config.block_k // CHAIN,
                "M_TILES": m_tiles,
                "STAGES": config.num_stages,
                "AHEAD": config.num_ahead,
                "GROUP": self.weight.group,
                "SHARED": self.weight.rows,
                "PAIRED": self.weight.paired,
                "HAS_BIAS": self.bias is not None,
                "GATE": self.gate or "",
                **early_options(),
                "num_warps": min(8, config.tile // 16),  # a warpgroup for 64 or 128 rows
                "enable_fp_fusion": False,  # as in `eight_bit_matmul.py`
            },
            (
                *(x.codes.dtype, out.dtype, None if self.bias is None else self.bias.dtype),
                *(n, k, num_groups, scales.shape[1], alignments(x.scales, scales, self.bias, out)),
            ),
        )

    def _described(self, config: StreamConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
        key = (config.rows, config.tile)
        found = self._boxes.get(key)
        if found is None:
            first, rest = boxes_of(config.rows)
            heights = (first, rest or first)
            low, high = (self._describe(config.rows, height) for height in heights)
            found = self._boxes[key] = low, high
        return found

    def _describe(self, rows: int, height: int) -> TensorDescriptor:
        """Each program's rows are a plane of their own, so a box cannot reach into the next one."""
        (n, k), codes = self.weight.shape, self.weight.codes
        return TensorDescriptor(
            Memory(codes.data_ptr(), codes.dtype),
            [n // rows, rows, k],
            [rows * k, k, 1],
            [1, height, CHAIN],
            gl.NVMMASharedLayout(128, 8, rank=3),
        )

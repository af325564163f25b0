"""Products of many rows, eight bits by eight, on Hopper: one warp copies, two warpgroups multiply.

A program takes tiles of 128 rows of x by 128 or 256 of the weight, one after the other; each
warpgroup has half of the rows. While one adds the sums of a band to its totals, the matrix units
work for the other. The arithmetic is that of `eight_bit_matmul.py`, band by band, so the bits
agree; few rows take `stream_eight_bit.py`.
"""

from __future__ import annotations

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
from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.eight_bit_configs import many_tiles, pick_many
from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight, scale_row
from quire.kernels.launch import Launcher, alignments, ceil_div
from quire.kernels.rehearsal import Memory
from quire.kernels.round_inputs import RoundedRows
from quire.kernels.silu_mul import activated

__all__ = ["ManyEightBit"]

TILE_M = 128  # rows of x
BAND, ROWS = gl.constexpr(CHAIN), gl.constexpr(64)
STAGES, CONSUMERS = gl.constexpr(4), gl.constexpr(2)
TOGETHER = gl.constexpr(16)  # tiles of x that share the weight's tiles in L2
# As in `paged_prefill_hopper.py`.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(3 * 168 - 2 * 240)


@gluon.jit
def _place_of(tile, M_TILES, N_TILES):
    """(tile of x, tile of w): up to TOGETHER tiles of x walk over the weight together."""
    of_group = TOGETHER * N_TILES
    first = tile // of_group * TOGETHER
    rows = gl.minimum(M_TILES - first, TOGETHER)
    within = tile % of_group
    return first + within % rows, within // rows


@gluon.jit
def _produce(x, w, rings, barriers, M_TILES, N_TILES, K, EARLY: gl.constexpr):
    """Fill every stage of the rings as soon as the consumers have freed it."""
    wait_for_inputs(EARLY)
    x_boxes, w_boxes = rings
    ready, free = barriers
    BYTES: gl.constexpr = x.block_type.nbytes + w.block_type.nbytes
    step = 0
    for tile in range(gl.program_id(0), M_TILES * N_TILES, gl.num_programs(0)):
        m, n = _place_of(tile, M_TILES, N_TILES)
        for k in range(0, K, BAND):
            stage = step % STAGES
            mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)  # passes while rings are new
            done = ready.index(stage)
            mbarrier.expect(done, BYTES)
            x_place, w_place = [m * x.block_shape[0], k], [n * w.block_shape[0], k]
            tma.async_copy_global_to_shared(x, x_place, done, x_boxes.index(stage))
            tma.async_copy_global_to_shared(w, w_place, done, w_boxes.index(stage))
            step += 1


@gluon.jit
def _add_half(
    total, part, x_tile, w_tile, scales, x_scales, m, of_scale, M, scale_stride, num_groups, band,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Floats of a band, from zero, added to the total of half a tile. `of_scale`: where its rows
    have theirs."""
    part = warpgroup_mma(x_tile, w_tile.permute([1, 0]), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    if GROUP > 0:
        group = band * BAND // GROUP
        w_scale = gl.load(scales + group * scale_stride + of_scale)
        x_scale = gl.load(x_scales + m * num_groups + group, mask=m < M, other=0.0)
        part = part * (w_scale[None, :] * x_scale[:, None])
    return total + part


@gluon.jit
def _store_half(
    total, scales, x_scales, bias, y, m_start, n_start, M, N,
    GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
):  # fmt: skip
    """Scales, bias in fp32, one rounding, the gate if there is one."""
    HALF: gl.constexpr = total.shape[1]
    m = m_start + gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout))
    n = n_start + gl.arange(0, HALF, gl.SliceLayout(0, total.type.layout))
    total = total.to(gl.float32)
    if GROUP == 0:
        x_scale = gl.load(x_scales + m, mask=m < M, other=0.0)
        w_scale = gl.load(scales + n, mask=n < N, other=0.0)
        total = (total * w_scale[None, :]) * x_scale[:, None]
    if HAS_BIAS:
        total += gl.load(bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    rounded = total.to(y.dtype.element_ty)
    PAIR: gl.constexpr = 1 if GATE == "" else 2  # weight rows of one output
    if GATE != "":
        gate, up = rounded.reshape([ROWS, HALF // 2, 2]).split()
        rounded = (activated(gate, GATE) * up.to(gl.float32)).to(rounded.dtype)
    layout: gl.constexpr = rounded.type.layout
    row = m_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = n_start // PAIR + gl.arange(0, HALF // PAIR, gl.SliceLayout(0, layout))
    cells = y + row.to(gl.int64)[:, None] * (N // PAIR) + column[None, :]
    gl.store(cells, rounded, mask=(row < M)[:, None] & (column < N // PAIR)[None, :])


@gluon.jit
def _consume(
    tiles, barriers, x_scales, scales, bias, y, M, N, K, num_groups, scale_stride,
    M_TILES, N_TILES, GROUP: gl.constexpr, SHARED: gl.constexpr, PAIRED: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATE: gl.constexpr, WG: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Rows [64 * WG, 64 * WG + 64) of every tile."""
    wait_for_inputs(EARLY)  # each warpgroup must wait for itself
    x_tiles, w_tiles = tiles
    ready, free = barriers
    HALF: gl.constexpr = w_tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    IS_INT: gl.constexpr = x_tiles.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if IS_INT else gl.float32
    nothing = gl.zeros([ROWS, HALF], SUM, layout)
    step = 0
    for tile in range(gl.program_id(0), M_TILES * N_TILES, gl.num_programs(0)):
        m_tile, n_tile = _place_of(tile, M_TILES, N_TILES)
        m_start, n_start = (m_tile * CONSUMERS + WG) * ROWS, n_tile * (2 * HALF)
        m = m_start + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        n = n_start + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        # Rows past N read the last one's scale: never stored.
        of_low = scale_row(gl.minimum(n, N - 1), N, SHARED, PAIRED)
        of_high = scale_row(gl.minimum(n + HALF, N - 1), N, SHARED, PAIRED)
        low = gl.zeros([ROWS, HALF], SUM, layout)
        high = gl.zeros([ROWS, HALF], SUM, layout)
        for band in range(K // BAND):
            stage = step % STAGES
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            x_tile = x_tiles.index(stage * CONSUMERS + WG)
            w_low, w_high = w_tiles.index(stage * 2), w_tiles.index(stage * 2 + 1)
            if IS_INT:
                low = warpgroup_mma(x_tile, w_low.permute([1, 0]), low, is_async=True)
                high = warpgroup_mma(x_tile, w_high.permute([1, 0]), high, is_async=True)
                low, high = warpgroup_mma_wait(0, deps=[low, high])
            else:
                low = _add_half(
                    low, nothing, x_tile, w_low, scales, x_scales, m, of_low, M, scale_stride,
                    num_groups, band, GROUP,
                )  # fmt: skip
                high = _add_half(
                    high, nothing, x_tile, w_high, scales, x_scales, m, of_high, M, scale_stride,
                    num_groups, band, GROUP,
                )  # fmt: skip
            mbarrier.arrive(free.index(stage), count=1)
            step += 1
        _store_half(low, scales, x_scales, bias, y, m_start, n_start, M, N, GROUP, HAS_BIAS, GATE)
        _store_half(
            high, scales, x_scales, bias, y, m_start, n_start + HALF, M, N, GROUP, HAS_BIAS, GATE
        )


@gluon.jit
def _make_rings(x, w):
    """Boxes of x and w for the copy engine, and the same memory as tiles: 64 rows of x for each
    warpgroup, halves of w."""
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    TILE_N: gl.constexpr = w.block_shape[0]
    x_boxes = gl.allocate_shared_memory(x.dtype, [STAGES, CONSUMERS * ROWS, BAND], flat)
    w_boxes = gl.allocate_shared_memory(w.dtype, [STAGES, TILE_N, BAND], flat)
    x_tiles = x_boxes._reinterpret(x.dtype, [STAGES * CONSUMERS, ROWS, BAND], flat)
    w_tiles = w_boxes._reinterpret(w.dtype, [STAGES * 2, TILE_N // 2, BAND], flat)
    return (x_boxes, w_boxes), (x_tiles, w_tiles)


@gluon.jit
def _make_barriers(ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit(do_not_specialize=["M", "M_TILES"])
def many_eight_bit_kernel(
    x, w,  # descriptors of [M, K] and [N, K]
    x_scales, scales, bias, y, M, N, K, num_groups, scale_stride, M_TILES, N_TILES,
    GROUP: gl.constexpr,
    SHARED: gl.constexpr,  # weight rows with one scale
    PAIRED: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    boxes, tiles = _make_rings(x, w)
    barriers = (_make_barriers(1), _make_barriers(CONSUMERS))
    gl.warp_specialize(
        [
            (_consume, (tiles, barriers, x_scales, scales, bias, y, M, N, K, num_groups,
                        scale_stride, M_TILES, N_TILES, GROUP, SHARED, PAIRED, HAS_BIAS, GATE,
                        0, EARLY)),
            (_consume, (tiles, barriers, x_scales, scales, bias, y, M, N, K, num_groups,
                        scale_stride, M_TILES, N_TILES, GROUP, SHARED, PAIRED, HAS_BIAS, GATE,
                        1, EARLY)),
            (_produce, (x, w, boxes, barriers, M_TILES, N_TILES, K, EARLY)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


_launch = Launcher(many_eight_bit_kernel)


class ManyEightBit:
    """Products by one contiguous weight, aligned to 16 bytes as the copy engine wants it, whose
    inputs fill bands. Only where `has_hopper_kernels`."""

    def __init__(self, weight: EightBitWeight, bias: Tensor | None, gate: str | None) -> None:
        self.weight, self.bias, self.gate = weight, bias, gate
        self.chip = chip_of(weight.codes.device)
        self.tiles = many_tiles(weight.group > 0, self.chip)
        self._described = {rows: _describe(weight.codes, rows) for rows in self.tiles}

    def pick(self, m: int) -> int | None:
        """Weight rows of a tile for m rows; None: another kernel is quicker."""
        if not self.tiles:
            return None
        return pick_many(m, self.weight.shape[0], self.tiles[-1], self.chip.units)

    def __call__(self, x: RoundedRows, out: Tensor, tile_n: int) -> None:
        """x [m, k] -> out [m, n], gated [m, n / 2]."""
        (m, k), (n, num_in) = x.codes.shape, self.weight.shape
        assert x.codes.dtype == self.weight.codes.dtype and k == num_in and k % CHAIN == 0
        assert out.is_contiguous() and x.codes.is_contiguous()
        m_tiles, n_tiles = ceil_div(m, TILE_M), ceil_div(n, tile_n)
        scales, num_groups = self.weight.scales, x.scales.shape[1]
        _launch(
            (min(m_tiles * n_tiles, self.chip.units), 1, 1),
            (
                *(_describe(x.codes, TILE_M), self._described[tile_n]),
                *(x.scales, scales, self.bias, out),
                *(m, n, k, num_groups, scales.shape[1], m_tiles, n_tiles),
            ),
            {
                "GROUP": self.weight.group,
                "SHARED": self.weight.rows,
                "PAIRED": self.weight.paired,
                "HAS_BIAS": self.bias is not None,
                "GATE": self.gate or "",
                **early_options(),
                "num_warps": 4,
                "enable_fp_fusion": False,  # as in `eight_bit_matmul.py`
            },
            (
                *(x.codes.dtype, out.dtype, None if self.bias is None else self.bias.dtype),
                *(
                    n,
                    k,
                    num_groups,
                    scales.shape[1],
                    tile_n,
                    alignments(x.scales, scales, self.bias, out),
                ),
            ),
        )


def _describe(codes: Tensor, rows: int) -> TensorDescriptor:
    count, k = codes.shape
    return TensorDescriptor(
        Memory(codes.data_ptr(), codes.dtype),
        [count, k],
        [k, 1],
        [rows, CHAIN],
        gl.NVMMASharedLayout(128, 8),
    )

"""Matmul of few rows by a packed weight on Hopper: codes stream through shared memory, and become
floats in the very registers that the matrix unit reads.

The sum is that of `packed_kernel.py`, one chain of fp32 matrix-unit additions over increasing k, so
the bits are the same. The copy engine brings codes from the slabs (`slabs.py`) and inputs; scales
of all groups of a program's rows are brought at its start. All of a weight is asked for before the
inputs are there, as in `stream_matmul.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from benchmarks.int4_old_unpack import code_pairs, power_pairs
from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind
from quire.kernels.packed_matmul import multiprocessors
from quire.kernels.rehearsal import Memory
from quire.kernels.slabs import Slabs
from quire.kernels.stream_matmul import store_tile
from quire.kernels.stream_packed_configs import (
    FIELD,
    StreamPackedConfig,
    pick_stream_packed,
)
from quire.kernels.unpack_scales import decoded

__all__ = ["StreamPacked"]

WIDTH = gl.constexpr(FIELD)


@gluon.jit
def _make_ring(x, codes, STAGES: gl.constexpr):
    """(boxes of codes, boxes of inputs, barriers), each for every stage."""
    of_codes: gl.constexpr = [STAGES] + codes.block_shape  # noqa: RUF005 (unknown to Gluon)
    of_inputs: gl.constexpr = [STAGES] + x.block_shape  # noqa: RUF005
    w_tiles = gl.allocate_shared_memory(gl.uint8, of_codes, codes.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, of_inputs, x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    return w_tiles, x_tiles, ready


@gluon.jit
def _flat(ring):
    """The same memory as slabs [rows, WIDTH] of codes and fields [BLOCK_M, WIDTH] of inputs."""
    w_tiles, x_tiles, _ = ring
    SLABS: gl.constexpr = w_tiles.shape[0] * w_tiles.shape[1]
    FIELDS: gl.constexpr = x_tiles.shape[0] * x_tiles.shape[1]
    of_codes: gl.constexpr = gl.NVMMASharedLayout(64, 8)
    of_inputs: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    w_flat = w_tiles._reinterpret(gl.uint8, [SLABS, w_tiles.shape[3], WIDTH], of_codes)
    x_flat = x_tiles._reinterpret(x_tiles.dtype, [FIELDS, x_tiles.shape[2], WIDTH], of_inputs)
    return w_flat, x_flat


@gluon.jit
def _ask_codes(codes, ring, tile, stage, step, BYTES: gl.constexpr):
    w_tiles, _, ready = ring
    mbarrier.expect(ready.index(stage), BYTES)
    first = step * codes.block_shape[0]
    place = w_tiles.index(stage)
    tma.async_copy_global_to_shared(codes, [first, tile, 0, 0], ready.index(stage), place)


@gluon.jit
def _ask_inputs(x, ring, m_start, stage, step):
    _, x_tiles, ready = ring
    first = step * x.block_shape[0]
    place = x_tiles.index(stage)
    tma.async_copy_global_to_shared(x, [first, m_start, 0], ready.index(stage), place)


@gluon.jit
def _ask_rest(sources, ring, m_start, tile, AHEAD: gl.constexpr, BYTES: gl.constexpr):
    """All stages' inputs, and the codes of those that were not asked for ahead."""
    x, codes = sources
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            _ask_codes(codes, ring, tile, i, i, BYTES)
        _ask_inputs(x, ring, m_start, i, i)


@gluon.jit
def _bring_scales(
    kept, words, n_start, N, ROWS: gl.constexpr, COUNT: gl.constexpr, num_warps: gl.constexpr
):
    """All words of the program's rows; the last ones of a tile are somebody else's."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    row = gl.arange(0, kept.shape[1], layout)
    for i in range(COUNT):
        async_copy.async_copy_global_to_shared(
            kept.index(i), words + i * N + n_start + row, mask=row < ROWS
        )
    async_copy.commit_group()


@gluon.jit
def _number(kept, group, PER: gl.constexpr, layout: gl.constexpr):
    """The bits of a group's number, for all rows."""
    word = kept.index(group // PER).load(layout)
    if PER > 1:
        WIDE: gl.constexpr = 32 // PER
        word = (word >> (group % PER * WIDE)) & ((1 << WIDE) - 1)
    return word


@gluon.jit
def _field(
    codes, kept, slab,
    F: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr,
    ZERO: gl.constexpr, ZEROS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Field F of a slab as floats, in the order of the codes."""
    PER: gl.constexpr = 1 if ZEROS == "u16" else 4 if SCALES == "power" else 2
    layout: gl.constexpr = codes.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    SPANS: gl.constexpr = 1 if GROUP >= WIDTH else WIDTH // GROUP  # groups of a field
    group = slab // (GROUP // (2 * WIDTH)) if GROUP > WIDTH else (slab * 2 + F) * SPANS
    bits = _number(kept, group, PER, of_rows)[:, None]
    spot = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :] // 4 % 4  # which 16 inputs
    for i in gl.static_range(1, SPANS):
        more = _number(kept, group + i, PER, of_rows)[:, None]
        bits = gl.where(spot >= i * (GROUP // 16), more, bits)
    if KIND == "e2m1":
        scale, codes = gl.broadcast(decoded(bits, "power"), codes)
        weight = power_pairs(codes, scale, F)
    else:
        scale = decoded(bits & 0xFFFF, SCALES)
        zero = ((bits >> 16) & 0xFFFF).to(gl.float32) if ZEROS == "u16" else bits * 0.0 + ZERO
        scale, codes = gl.broadcast(scale, codes)
        zero, codes = gl.broadcast(zero, codes)
        weight = code_pairs(codes, zero, scale, F, dtype, SCALES)
    return weight


@gluon.jit
def _as_operand(weight, operand: gl.constexpr, SPARSE: gl.constexpr):
    """From the order of the codes to that of the inputs; nothing moves between registers.

    SPARSE: every other eight rows of the operand are none of the weight's."""
    ROWS: gl.constexpr = weight.shape[0]
    parts = weight.reshape([ROWS, 4, 4, 2, 2]).permute([0, 2, 3, 1, 4])
    tile = parts.reshape([ROWS, WIDTH])
    if SPARSE:
        both = gl.join(tile, gl.zeros_like(tile)).reshape([ROWS // 8, 8, WIDTH, 2])
        tile = both.permute([0, 3, 1, 2]).reshape([2 * ROWS, WIDTH])
    return gl.convert_layout(tile, operand, assert_trivial=True)


@gluon.jit
def _own_rows(total, SPARSE: gl.constexpr):
    """[rows of the tile, BLOCK_M] of what the matrix unit summed."""
    if SPARSE:
        ROWS: gl.constexpr = total.shape[0] // 2
        parts = total.reshape([ROWS // 8, 2, 8, total.shape[1]]).permute([0, 2, 3, 1])
        own, _ = parts.split()
        total = own.reshape([ROWS, own.shape[2]])
    return total


@gluon.constexpr_function
def _lanes(rows, num_warps):
    """Which thread reads which bytes of a tile: 16 neighbouring ones of one row, or of two that are
    eight rows apart where there are as many."""
    is_sparse = rows < 16 * num_warps
    high = 8 if is_sparse else 16
    regs = [[0, 1], [0, 2], [0, 4], [0, 8]] + ([] if is_sparse else [[8, 0]])
    warps = [[high, 0], [2 * high, 0]] + ([[4 * high, 0]] if num_warps == 8 else [])
    return gl.DistributedLinearLayout(
        reg_bases=regs,
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[rows, 64],
    )


@gluon.jit
def _add_step(
    total, flat, kept, step, stage, FIELDS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """total plus the products of a stage: unpacking a field goes on while the one before is
    multiplied. With products under way at the end of a loop's body the compiler would wait for
    each of them, so none are."""
    w_flat, x_flat = flat
    TILE: gl.constexpr = w_flat.shape[1]
    SPARSE: gl.constexpr = total.shape[0] > TILE
    operand: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    lanes: gl.constexpr = _lanes(TILE, total.shape[0] // 16)
    for f in gl.static_range(FIELDS):
        slab = f // 2
        codes = w_flat.index(stage * (FIELDS // 2) + slab).load(lanes)
        weight = _field(
            codes, kept, step * (FIELDS // 2) + slab, f % 2,
            KIND, GROUP, SCALES, ZERO, ZEROS, dtype,
        )  # fmt: skip
        inputs = x_flat.index(stage * FIELDS + f).permute([1, 0])
        total = warpgroup_mma(_as_operand(weight, operand, SPARSE), inputs, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit(do_not_specialize=["M"])
def stream_packed_kernel(
    x,  # descriptor of [M, K], a box [BLOCK_M, WIDTH]
    codes,  # descriptor of [slabs, N / ROWS, ROWS, WIDTH] bytes, a box [1, 1, TILE, WIDTH]
    words, bias, y, M, N, K, stride_ym,
    KIND: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, ZERO: gl.constexpr,
    ZEROS: gl.constexpr, COUNT: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr, M_TILES: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    DTYPE: gl.constexpr = x.dtype
    FIELDS: gl.constexpr = x.block_shape[0]  # of a stage
    tile = gl.program_id(0) // M_TILES
    m_start = gl.program_id(0) % M_TILES * BLOCK_M
    ring = _make_ring(x, codes, STAGES)
    kept = gl.allocate_shared_memory(gl.int32, [COUNT, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BYTES: gl.constexpr = codes.block_type.nbytes + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        _ask_codes(codes, ring, tile, i, i, BYTES)
    _bring_scales(kept, words, tile * ROWS, N, ROWS, COUNT, num_warps)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    _ask_rest((x, codes), ring, m_start, tile, AHEAD, BYTES)
    async_copy.wait_group(0)
    SPARSE: gl.constexpr = 16 * num_warps > TILE
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    flat = _flat(ring)
    total = gl.zeros([16 * num_warps, BLOCK_M], gl.float32, of_total)
    num_steps = K // (FIELDS * WIDTH)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(ring[2].index(stage), i // STAGES & 1)
        total = _add_step(
            total, flat, kept, i, stage, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, DTYPE
        )
        if i + STAGES < num_steps:
            _ask_codes(codes, ring, tile, stage, i + STAGES, BYTES)
            _ask_inputs(x, ring, m_start, stage, i + STAGES)
    total = _own_rows(total, SPARSE)
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_ym, ROWS, HAS_BIAS, GATE, num_warps)


_launch = Launcher(stream_packed_kernel)


class StreamPacked:
    """Products by one packed weight. Only where `has_hopper_kernels` and `can_stream`."""

    def __init__(self, slabs: Slabs, bias: Tensor | None, gate: str | None) -> None:
        assert slabs.scales is not None, f"got {slabs.form}"
        self.slabs, self.words, self.bias, self.gate = slabs, slabs.scales, bias, gate
        self._boxes: dict[tuple[int, ...], TensorDescriptor] = {}
        # Weights are read before the wait, so what wrote them must be over by the first call.
        if slabs.codes.is_cuda:
            torch.cuda.current_stream(slabs.codes.device).synchronize()

    def __call__(self, x: Tensor, out: Tensor, config: StreamPackedConfig) -> None:
        """x [m, k] -> out [m, n], gated [m, n / 2]. An fp32 `out` [m, n] gets the sums, ungated."""
        _launch(*self.plan(x, out, config))

    def pick(self, m: int) -> StreamPackedConfig:
        units = multiprocessors(self.words.device)
        return pick_stream_packed(m, self.slabs.shape, len(self.words), units)

    def plan(
        self, x: Tensor, out: Tensor, config: StreamPackedConfig
    ) -> tuple[tuple[int, int, int], tuple[object, ...], dict[str, object], tuple[object, ...]]:
        """What `Launcher` takes."""
        (m, k), (n, num_in), form = x.shape, self.slabs.shape, self.slabs.form
        of_step = 2 * WIDTH.value * config.slabs
        gate = self.gate if out.dtype == x.dtype else None
        assert k == num_in and x.is_contiguous() and out.stride(1) == 1, f"{x.shape=} {k=}"
        assert n % config.rows == 0 and k % of_step == 0, f"{n=} {k=} {config=}"
        # Every copy must be waited for, or it outlives the program.
        assert 2 <= config.num_stages <= k // of_step, f"{k=} {config=}"
        m_tiles = ceil_div(m, config.block_m)
        described = (_described(x, config), self._described(config))
        return (
            (n // config.rows * m_tiles, 1, 1),
            (*described, self.words, self.bias, out, m, n, k, out.stride(0)),
            {
                "KIND": form.kind,
                "GROUP": form.group,
                "SCALES": form.scales,
                "ZERO": form.zero,
                "ZEROS": form.zeros,
                "COUNT": len(self.words),
                "ROWS": config.rows,
                "TILE": config.tile,
                "BLOCK_M": config.block_m,
                "M_TILES": m_tiles,
                "STAGES": config.num_stages,
                "AHEAD": config.num_ahead,
                "HAS_BIAS": self.bias is not None,
                "GATE": gate or "",
                **early_options(),
                "num_warps": max(4, config.tile // 16),
            },
            (
                *(x.dtype, out.dtype, None if self.bias is None else self.bias.dtype),
                *(n, k, config.slabs),
                alignments(out, self.bias, self.words), int_kind(out.stride(0)),
            ),
        )  # fmt: skip

    def _described(self, config: StreamPackedConfig) -> TensorDescriptor:
        """Codes as [slabs, programs, rows of a program, bytes]: a box higher than a program's rows
        finds nothing below them."""
        key = (config.rows, config.tile, config.slabs)
        found = self._boxes.get(key)
        if found is None:
            (n, k), codes, wide = self.slabs.shape, self.slabs.codes, WIDTH.value
            found = self._boxes[key] = TensorDescriptor(
                Memory(codes.data_ptr(), torch.uint8),
                [k // (2 * wide), n // config.rows, config.rows, wide],
                [n * wide, config.rows * wide, wide, 1],
                [config.slabs, 1, config.tile, wide],
                gl.NVMMASharedLayout(64, 8, rank=4),
            )
        return found


def _described(x: Tensor, config: StreamPackedConfig) -> TensorDescriptor:
    """Rows of x as [fields, rows, inputs of a field]."""
    (m, k), wide = x.shape, WIDTH.value
    return TensorDescriptor(
        Memory(x.data_ptr(), x.dtype),
        [k // wide, m, wide],
        [wide, k, 1],
        [2 * config.slabs, config.block_m, wide],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )

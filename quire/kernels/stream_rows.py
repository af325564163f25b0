"""Matmul of few rows by a wide packed weight on Hopper: warpgroups with rows of their own.

Up to four warpgroups of a program multiply the same inputs, which are brought once for all of them,
by neighbouring rows of the weight. Nothing binds them together but the stages, so one unpacks while
the matrix units work for another. One more warp asks for codes and inputs. The chain of each sum is
that of `stream_packed.py`, and so are the bits.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.early import let_next_start, wait_for_last
from quire.kernels.launch import Launcher
from quire.kernels.rehearsal import Memory
from quire.kernels.stream_matmul import store_tile
from quire.kernels.stream_packed import (
    WIDTH,
    StreamPacked,
    as_operand,
    ask_codes,
    ask_inputs,
    ask_rest,
    bring_scales,
    field_of,
    flat_ring,
    lanes_of,
    make_ring,
    own_rows,
)
from quire.kernels.stream_packed_configs import StreamPackedConfig

__all__ = ["StreamRows"]

WARPS = gl.constexpr(4)  # of a group
HEIGHT = gl.constexpr(64)  # rows of the matrix instruction


@gluon.jit
def _produce(
    x, codes, ring, free, m_start, tile, num_steps, BYTES: gl.constexpr, EARLY: gl.constexpr
):
    """Fill every stage again as soon as all groups freed it; the first round is under way."""
    wait_for_last(EARLY)
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in range(STAGES, num_steps):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        ask_codes(codes, ring, tile, stage, i, BYTES)
        ask_inputs(x, ring, m_start, stage, i)


@gluon.jit
def _multiply(
    flat, ready, free, kept, bias, y, m_start, n_start, M, num_steps, stride_ym,
    TEAM: gl.constexpr, GROUPS: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr,
    GROUP: gl.constexpr, SCALES: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr,
    dtype: gl.constexpr, ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The rows of a group, from the first input to the store."""
    wait_for_last(EARLY)
    w_flat, x_flat = flat
    STAGES: gl.constexpr = ready.shape[0]
    TILE: gl.constexpr = w_flat.shape[1]
    BLOCK_M: gl.constexpr = x_flat.shape[1]
    SLABS: gl.constexpr = FIELDS // 2
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_total, 2)
    lanes: gl.constexpr = lanes_of(TILE, WARPS)
    total = gl.zeros([HEIGHT, BLOCK_M], gl.float32, of_total)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        for f in gl.static_range(FIELDS):
            bytes_of = w_flat.index((stage * SLABS + f // 2) * GROUPS + TEAM).load(lanes)
            weight = field_of(
                bytes_of, kept, i * SLABS + f // 2, f % 2, KIND, GROUP, SCALES, ZERO, ZEROS, dtype
            )
            inputs = x_flat.index(stage * FIELDS + f).permute([1, 0])
            weight = as_operand(weight, operand, TILE < HEIGHT)
            total = warpgroup_mma(weight, inputs, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index(stage), count=1)
    total = own_rows(total, TILE < HEIGHT)
    store_tile(total, y, bias, m_start, n_start, M, stride_ym, ROWS, HAS_BIAS, GATE, WARPS)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit(do_not_specialize=["M"])
def stream_rows_kernel(
    x,  # descriptor of [M, K], a box [BLOCK_M, WIDTH]
    codes,  # descriptor of [slabs, N / ROWS, ROWS, WIDTH] bytes, a box [1, GROUPS, TILE, WIDTH]
    words, bias, y, M, N, K, stride_ym,
    KIND: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, ZERO: gl.constexpr,
    ZEROS: gl.constexpr, COUNT: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr, M_TILES: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    EARLY: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    T: gl.constexpr = x.dtype
    FIELDS: gl.constexpr = x.block_shape[0]  # of a stage
    tile = gl.program_id(0) // M_TILES * GROUPS
    m_start = gl.program_id(0) % M_TILES * BLOCK_M
    ring = make_ring(x, codes, STAGES)
    free = _barriers(STAGES, GROUPS)
    BYTES: gl.constexpr = codes.block_type.nbytes + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        ask_codes(codes, ring, tile, i, i, BYTES)
    kept = ()
    for i in gl.static_range(GROUPS):
        own = bring_scales(words, (tile + i) * ROWS, N, ROWS, TILE, COUNT, num_warps)
        kept = kept + (own,)  # noqa: RUF005 (unknown to Gluon)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    ask_rest((x, codes), ring, m_start, tile, AHEAD, BYTES)
    async_copy.wait_group(0)
    flat = flat_ring(ring)
    ready = ring[2]
    steps = K // (FIELDS * WIDTH)
    n = tile * ROWS
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (flat, ready, free, kept[0], bias, y, m_start, n, M, steps, stride_ym,
                             0, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T, ROWS,
                             HAS_BIAS, GATE, EARLY)),
                (_produce, (x, codes, ring, free, m_start, tile, steps, BYTES, EARLY)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (flat, ready, free, kept[0], bias, y, m_start, n, M, steps, stride_ym,
                             0, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T, ROWS,
                             HAS_BIAS, GATE, EARLY)),
                (_multiply, (flat, ready, free, kept[1], bias, y, m_start, n + ROWS, M, steps,
                             stride_ym, 1, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T,
                             ROWS, HAS_BIAS, GATE, EARLY)),
                (_produce, (x, codes, ring, free, m_start, tile, steps, BYTES, EARLY)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (flat, ready, free, kept[0], bias, y, m_start, n, M, steps, stride_ym,
                             0, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T, ROWS,
                             HAS_BIAS, GATE, EARLY)),
                (_multiply, (flat, ready, free, kept[1], bias, y, m_start, n + ROWS, M, steps,
                             stride_ym, 1, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T,
                             ROWS, HAS_BIAS, GATE, EARLY)),
                (_multiply, (flat, ready, free, kept[2], bias, y, m_start, n + 2 * ROWS, M, steps,
                             stride_ym, 2, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T,
                             ROWS, HAS_BIAS, GATE, EARLY)),
                (_multiply, (flat, ready, free, kept[3], bias, y, m_start, n + 3 * ROWS, M, steps,
                             stride_ym, 3, GROUPS, FIELDS, KIND, GROUP, SCALES, ZERO, ZEROS, T,
                             ROWS, HAS_BIAS, GATE, EARLY)),
                (_produce, (x, codes, ring, free, m_start, tile, steps, BYTES, EARLY)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


_launch = Launcher(stream_rows_kernel)


class StreamRows(StreamPacked):
    """The same product by groups with rows of their own. `config.rows` are those of a group."""

    groups = 2
    is_light = False

    def __call__(self, x: Tensor, out: Tensor, config: StreamPackedConfig) -> None:
        grid, args, options, kind = self.plan(x, out, config)
        programs, rest = divmod(grid[0], self.groups)
        assert config.tile <= HEIGHT.value and rest == 0, f"{config=}"
        options = {**options, "GROUPS": self.groups, "num_warps": 4}
        options["REGISTERS"] = 104 if self.is_light else {1: 216, 2: 216, 4: 112}[self.groups]
        if self.is_light:
            options["maxnreg"] = {1: 64, 2: 80}[self.groups]
        _launch((programs, 1, 1), args, options, kind)

    def _described(self, config: StreamPackedConfig) -> TensorDescriptor:
        (n, k), codes, wide = self.slabs.shape, self.slabs.codes, WIDTH.value
        return TensorDescriptor(
            Memory(codes.data_ptr(), codes.dtype),
            [k // (2 * wide), n // config.rows, config.rows, wide],
            [n * wide, config.rows * wide, wide, 1],
            [config.slabs, self.groups, config.tile, wide],
            gl.NVMMASharedLayout(64, 8, rank=4),
        )

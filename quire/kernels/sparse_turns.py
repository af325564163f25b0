"""Matmul of few rows by a narrow 2:4 weight on Hopper: two warpgroups take turns at one sum, as in
`stream_turns.py`, which says why and how; the slabs are those of `stream_sparse.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.early import let_next_start, wait_for_last
from quire.kernels.launch import Launcher
from quire.kernels.sparse_parts import (
    ask_rest_of_sparse,
    ask_sparse,
    flat_sparse,
    make_sparse_ring,
    operands_of,
)
from quire.kernels.stream_matmul import store_tile
from quire.kernels.stream_parts import WIDTH, ask_inputs, own_rows
from quire.kernels.stream_turns import (
    FEW_REGISTERS,
    GROUPS,
    HEIGHT,
    REGISTERS,
    WARPS,
    as_held,
    barriers,
)

__all__ = ["launch"]


@gluon.jit
def _produce(
    x, weight, ring, free, m_start, tile, num_steps, BYTES: gl.constexpr, EARLY: gl.constexpr
):
    """Fill every stage again as soon as it is free; the first round was asked for before."""
    wait_for_last(EARLY)
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in range(STAGES, num_steps):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        ask_sparse(weight, ring, tile, stage, i, BYTES)
        ask_inputs(x, ring, m_start, stage, i)


@gluon.jit
def _take_turns(
    flat, ready, free, passed, held, num_steps, TURN: gl.constexpr, SLABS: gl.constexpr
):
    """Steps TURN, TURN + GROUPS ... of the sum."""
    w_flat, x_flat = flat
    STAGES: gl.constexpr = ready.shape[0]
    TILE: gl.constexpr = w_flat[0].shape[1]
    BLOCK_M: gl.constexpr = x_flat.shape[1]
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_total, 2)
    for i in range(TURN, num_steps, GROUPS):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        weights = gl.tuple([])
        for slab in gl.static_range(SLABS):
            weights += operands_of(w_flat, stage * SLABS + slab, operand, TILE < HEIGHT, WARPS)
        mbarrier.wait(passed, (i + 1) & 1)  # the step before is in the sum
        total = held.load(of_total)
        for f in gl.static_range(2 * SLABS):
            inputs = x_flat.index(stage * (2 * SLABS) + f).permute([1, 0])
            total = warpgroup_mma(weights[f], inputs, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        held.store(total)
        mbarrier.arrive(passed, count=1)
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit(do_not_specialize=["M"])
def sparse_turns_kernel(
    x, values, bits,  # descriptors, as in `stream_sparse.py`
    bias, y, M, K, stride_ym,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr, M_TILES: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    SLABS: gl.constexpr = values.block_shape[0]  # of a stage
    tile = gl.program_id(0) // M_TILES
    m_start = gl.program_id(0) % M_TILES * BLOCK_M
    weight = (values, bits)
    ring = make_sparse_ring(x, values, bits, STAGES)
    free = barriers(STAGES)
    passed = barriers(1).index(0)
    OF_WEIGHT: gl.constexpr = values.block_type.nbytes + bits.block_type.nbytes
    BYTES: gl.constexpr = OF_WEIGHT + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        ask_sparse(weight, ring, tile, i, i, BYTES)
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    nothing = gl.zeros([HEIGHT, BLOCK_M], gl.float32, of_total)
    held = gl.allocate_shared_memory(gl.float32, [HEIGHT, BLOCK_M], as_held(BLOCK_M), nothing)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    ask_rest_of_sparse((x, weight), ring, m_start, tile, AHEAD, BYTES)
    flat = flat_sparse(ring)
    num_steps = K // (SLABS * 2 * WIDTH)
    gl.warp_specialize(
        [
            (_take_turns, (flat, ring[2], free, passed, held, num_steps, 0, SLABS)),
            (_take_turns, (flat, ring[2], free, passed, held, num_steps, 1, SLABS)),
            (_produce, (x, weight, ring, free, m_start, tile, num_steps, BYTES, EARLY)),
        ],
        [WARPS, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
    mbarrier.wait(passed, (num_steps + 1) & 1)
    total = own_rows(held.load(of_total), TILE < HEIGHT)
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_ym, ROWS, HAS_BIAS, GATE, num_warps)


launch = Launcher(sparse_turns_kernel)

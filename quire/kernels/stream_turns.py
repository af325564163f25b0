"""Matmul of few rows by a narrow packed weight on Hopper: two warpgroups take turns at one sum.

Where a multiprocessor has few rows of the weight, `stream_packed.py` leaves it one warpgroup, whose
schedulers mostly wait. Here two share the rows. Each unpacks every other stage into its registers,
then waits for the sum so far, which lies in shared memory, adds its products and hands the sum on.
So the chain of matrix-unit additions is the same one, in the same order, while the groups unpack
side by side. One more warp asks for codes and inputs.

There cannot be more than two: a barrier tells a phase from the next one and no more, and of three
groups one could wait for a phase while the phase two before it is the last that is over.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.early import let_next_start, wait_for_last
from quire.kernels.launch import Launcher
from quire.kernels.stream_fields import field_of, own_value
from quire.kernels.stream_matmul import store_tile
from quire.kernels.stream_parts import (
    WIDTH,
    as_operand,
    ask_codes,
    ask_inputs,
    ask_rest,
    bring_scales,
    bytes_of,
    flat_ring,
    lanes_of,
    make_ring,
    own_rows,
)

__all__ = [
    "FEW_REGISTERS",
    "GROUPS",
    "HEIGHT",
    "REGISTERS",
    "WARPS",
    "as_held",
    "barriers",
    "launch",
]

WARPS = gl.constexpr(4)  # of a group
HEIGHT = gl.constexpr(64)  # rows of the matrix instruction
GROUPS = gl.constexpr(2)
REGISTERS = gl.constexpr(216)  # of a thread of the second group; the first gets the rest
FEW_REGISTERS = gl.constexpr(24)  # of a thread that only asks


@gluon.constexpr_function
def as_held(block_m):
    """Shared memory in the order of a group's registers: 16 neighbouring bytes of each thread."""
    columns = [[0, 1 << bit] for bit in range(3, block_m.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.SharedLinearLayout([[0, 1], [8, 0], *lanes, [16, 0], [32, 0], *columns])


@gluon.jit
def _produce(
    x, planes, ring, free, m_start, tile, num_steps, BYTES: gl.constexpr, EARLY: gl.constexpr
):
    """Fill every stage again as soon as it is free; the first round was asked for before."""
    wait_for_last(EARLY)
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in range(STAGES, num_steps):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES - 1) & 1)
        ask_codes(planes, ring, tile, stage, i, BYTES)
        ask_inputs(x, ring, m_start, stage, i)


@gluon.jit
def _take_turns(
    flat, ready, free, passed, held, kept, table, num_steps,
    TURN: gl.constexpr, FIELDS: gl.constexpr, FORM: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Steps TURN, TURN + GROUPS ... of the sum."""
    w_flat, x_flat = flat
    STAGES: gl.constexpr = ready.shape[0]
    TILE: gl.constexpr = w_flat[0].shape[1]
    BLOCK_M: gl.constexpr = x_flat.shape[1]
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_total, 2)
    lanes: gl.constexpr = lanes_of(TILE, WARPS)
    own = own_value(table, FORM)
    for i in range(TURN, num_steps, GROUPS):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        weights = gl.tuple([])
        for f in gl.static_range(FIELDS):
            weight = field_of(w_flat, lanes, own, kept, i, stage, f, FIELDS, FORM, dtype)
            weights += (as_operand(weight, operand, TILE < HEIGHT),)
        mbarrier.wait(passed, (i + 1) & 1)  # the step before is in the sum
        total = held.load(of_total)
        for f in gl.static_range(FIELDS):
            inputs = x_flat.index(stage * FIELDS + f).permute([1, 0])
            total = warpgroup_mma(weights[f], inputs, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        held.store(total)
        mbarrier.arrive(passed, count=1)
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit(do_not_specialize=["M"])
def stream_turns_kernel(
    x, codes, high, words, table,  # as in `stream_packed.py`
    bias, y, M, N, K, stride_ym, FORM: gl.constexpr,
    ROWS: gl.constexpr, TILE: gl.constexpr, BLOCK_M: gl.constexpr, M_TILES: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, HAS_BIAS: gl.constexpr, GATE: gl.constexpr,
    EARLY: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    DTYPE: gl.constexpr = x.dtype
    FIELDS: gl.constexpr = x.block_shape[0]  # of a stage
    tile = gl.program_id(0) // M_TILES
    m_start = gl.program_id(0) % M_TILES * BLOCK_M
    planes = (codes,) if high is None else (codes, high)
    ring = make_ring(x, planes, STAGES)
    free = barriers(STAGES)
    passed = barriers(1).index(0)
    BYTES: gl.constexpr = bytes_of(planes) + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        ask_codes(planes, ring, tile, i, i, BYTES)
    kept = bring_scales(words, tile * ROWS, N, ROWS, TILE, FORM.count, num_warps)
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    nothing = gl.zeros([HEIGHT, BLOCK_M], gl.float32, of_total)
    held = gl.allocate_shared_memory(gl.float32, [HEIGHT, BLOCK_M], as_held(BLOCK_M), nothing)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    ask_rest((x, planes), ring, m_start, tile, AHEAD, BYTES)
    async_copy.wait_group(0)
    flat = flat_ring(ring)
    num_steps = K // (FIELDS * WIDTH)
    gl.warp_specialize(
        [
            (_take_turns, (flat, ring[2], free, passed, held, kept, table, num_steps, 0,
                           FIELDS, FORM, DTYPE)),
            (_take_turns, (flat, ring[2], free, passed, held, kept, table, num_steps, 1,
                           FIELDS, FORM, DTYPE)),
            (_produce, (x, planes, ring, free, m_start, tile, num_steps, BYTES, EARLY)),
        ],
        [WARPS, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
    mbarrier.wait(passed, (num_steps + 1) & 1)
    total = own_rows(held.load(of_total), TILE < HEIGHT)
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_ym, ROWS, HAS_BIAS, GATE, num_warps)


launch = Launcher(stream_turns_kernel)

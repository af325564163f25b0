"""What kernels that stream 2:4 weights on Hopper are made of: how values, places and inputs come
into shared memory, and how they become operands of the matrix unit.

`stream_sparse.py` puts these together for one warpgroup or two that have rows of their own,
`sparse_turns.py` for two that take turns at the same rows. A slab is two fields of `WIDTH` inputs:
a row of it has 128 bytes of values and 16 bytes of bits, a word for each thread of four.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from quire.kernels.sparse_unpack import PER_WORD, sparse_pairs
from quire.kernels.stream_parts import WIDTH, ask_inputs, rows_as_operand

__all__ = [
    "BITS",
    "ask_rest_of_sparse",
    "ask_sparse",
    "flat_sparse",
    "make_sparse_ring",
    "operands_of",
]

BITS = gl.constexpr(4)  # words of a row of a slab
_PER = gl.constexpr(PER_WORD)


@gluon.jit
def make_sparse_ring(x, values, bits, STAGES: gl.constexpr):
    """((boxes of values, boxes of bits), boxes of inputs, barriers), each for every stage."""
    of_values: gl.constexpr = [STAGES] + values.block_shape  # noqa: RUF005 (unknown to Gluon)
    of_bits: gl.constexpr = [STAGES] + bits.block_shape  # noqa: RUF005
    of_inputs: gl.constexpr = [STAGES] + x.block_shape  # noqa: RUF005
    v_tiles = gl.allocate_shared_memory(values.dtype, of_values, values.layout)
    b_tiles = gl.allocate_shared_memory(gl.int32, of_bits, bits.layout)
    x_tiles = gl.allocate_shared_memory(x.dtype, of_inputs, x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    return (v_tiles, b_tiles), x_tiles, ready


@gluon.jit
def flat_sparse(ring):
    """The same memory as slabs of values [rows, WIDTH] and of words [rows, BITS], and as fields
    [BLOCK_M, WIDTH] of inputs."""
    w_tiles, x_tiles, _ = ring
    v_tiles, b_tiles = w_tiles
    SLABS: gl.constexpr = v_tiles.shape[0] * v_tiles.shape[1]
    TILE: gl.constexpr = v_tiles.shape[3]
    FIELDS: gl.constexpr = x_tiles.shape[0] * x_tiles.shape[1]
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    v_flat = v_tiles._reinterpret(v_tiles.dtype, [SLABS, TILE, WIDTH], wide)
    b_flat = b_tiles._reinterpret(gl.int32, [SLABS, TILE, BITS], plain)
    x_flat = x_tiles._reinterpret(x_tiles.dtype, [FIELDS, x_tiles.shape[2], WIDTH], wide)
    return (v_flat, b_flat), x_flat


@gluon.jit
def ask_sparse(weight, ring, tile, stage, step, BYTES: gl.constexpr):
    """BYTES is all that the stage waits for."""
    values, bits = weight
    w_tiles, _, ready = ring
    v_tiles, b_tiles = w_tiles
    done = ready.index(stage)
    mbarrier.expect(done, BYTES)
    first = step * values.block_shape[0]
    place = v_tiles.index(stage)
    tma.async_copy_global_to_shared(values, [first, tile, 0, 0], done, place)
    place = b_tiles.index(stage)
    runs = tile * bits.block_shape[1]  # of rows
    tma.async_copy_global_to_shared(bits, [first, runs, 0], done, place)


@gluon.jit
def ask_rest_of_sparse(sources, ring, m_start, tile, AHEAD: gl.constexpr, BYTES: gl.constexpr):
    """All stages' inputs, and what was not asked for ahead of the weight."""
    x, weight = sources
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            ask_sparse(weight, ring, tile, i, i, BYTES)
        ask_inputs(x, ring, m_start, i, i)


@gluon.constexpr_function
def _high(rows, num_warps):
    """The first bit of a row that tells warps apart."""
    return 8 if rows < 16 * num_warps else 16


@gluon.constexpr_function
def _of_weights(rows, num_warps):
    """Which thread has which weights [rows, registers of a word, 2, halves of a run, 2]: a row, or
    two that are eight rows apart where there are as many."""
    high = _high(rows, num_warps)
    regs = [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0], [0, 8, 0, 0, 0]]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0], *([row, 0, 0, 0, 0] for row in (1, 2, 4))]
    return gl.DistributedLinearLayout(
        reg_bases=regs + ([[8, 0, 0, 0, 0]] if high == 16 else []),
        lane_bases=lanes,
        warp_bases=[[high << bit, 0, 0, 0, 0] for bit in range(num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, PER_WORD, 2, 2, 2],
    )


@gluon.constexpr_function
def _of_values(rows, num_warps):
    """Which thread reads which values: two threads the same 64 neighbouring bytes of a row."""
    high = _high(rows, num_warps)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1 << bit] for bit in range(5)] + ([[8, 0]] if high == 16 else []),
        lane_bases=[[0, 0], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[high << bit, 0] for bit in range(num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, 64],
    )


@gluon.constexpr_function
def _of_bits(rows, num_warps):
    """Which thread reads which words: its own, of each of its rows."""
    high = _high(rows, num_warps)
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]] if high == 16 else [],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[high << bit, 0] for bit in range(num_warps.bit_length() - 1)],
        block_bases=[],
        shape=[rows, 4],
    )


@gluon.jit
def operands_of(flat, slab, operand: gl.constexpr, SPARSE: gl.constexpr, num_warps: gl.constexpr):
    """Both fields of a slab. SPARSE: as for `rows_as_operand`."""
    v_flat, b_flat = flat
    TILE: gl.constexpr = v_flat.shape[1]
    whole: gl.constexpr = _of_weights(TILE, num_warps)
    of_runs: gl.constexpr = gl.SliceLayout(3, whole)
    of_words: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(4, whole))
    values = v_flat.index(slab).load(_of_values(TILE, num_warps))
    values = values.reshape([TILE, 2, _PER, 2]).permute([0, 2, 1, 3])
    values = gl.convert_layout(values, of_runs, assert_trivial=True)[:, :, :, None, :]
    bits = b_flat.index(slab).load(_of_bits(TILE, num_warps)).reshape([TILE, 2, 2])
    bits = gl.convert_layout(bits, of_words, assert_trivial=True)[:, None, :, :, None]
    of_halves: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, whole)))
    )
    half = gl.arange(0, 2, of_halves)[None, None, None, :, None]
    values, bits = gl.broadcast(values, bits)
    half, _ = gl.broadcast(half, bits)
    weight = sparse_pairs(values, bits, half)
    fields = weight.reshape([TILE, 2, _PER // 2, 2, 2, 2]).permute([0, 2, 3, 4, 5, 1])
    first, second = fields.split()
    first = rows_as_operand(first.reshape([TILE, WIDTH]), operand, SPARSE)
    return first, rows_as_operand(second.reshape([TILE, WIDTH]), operand, SPARSE)

"""What kernels that stream codes of four or eight bits on Hopper are made of: how codes and inputs
come into shared memory, and how codes become the operand of the matrix unit.

`stream_packed.py` puts these together for one warpgroup or two that have rows of their own,
`stream_turns.py` for two that take turns at the same rows.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.rehearsal import Memory
from quire.kernels.stream_packed_configs import FIELD, StreamPackedConfig

__all__ = [
    "WIDTH",
    "as_operand",
    "ask_codes",
    "ask_inputs",
    "ask_rest",
    "bring_scales",
    "bytes_of",
    "described_inputs",
    "flat_ring",
    "lanes_of",
    "make_ring",
    "own_rows",
    "rows_as_operand",
]

WIDTH = gl.constexpr(FIELD)


@gluon.jit
def _boxes(described, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES] + described.block_shape  # noqa: RUF005 (unknown to Gluon)
    return gl.allocate_shared_memory(described.dtype, shape, described.layout)


@gluon.jit
def make_ring(x, planes, STAGES: gl.constexpr):
    """(boxes of each plane of codes, boxes of inputs, barriers), each for every stage."""
    w_tiles = gl.tuple([])
    for i in gl.static_range(len(planes)):
        w_tiles += (_boxes(planes[i], STAGES),)
    x_tiles = _boxes(x, STAGES)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    return w_tiles, x_tiles, ready


@gluon.constexpr_function
def _num_tiles(shape):
    """All but the rows of a box and their bytes."""
    count = 1
    for size in shape[:-2]:
        count *= size
    return count


@gluon.jit
def _flat_tiles(tiles):
    shape: gl.constexpr = [_num_tiles(tiles.shape), tiles.shape[-2], WIDTH]
    return tiles._reinterpret(gl.uint8, shape, gl.NVMMASharedLayout(64, 8))


@gluon.jit
def flat_ring(ring):
    """The same memory as tiles [rows, WIDTH] of codes, those of each plane, and fields [BLOCK_M,
    WIDTH] of inputs."""
    w_tiles, x_tiles, _ = ring
    FIELDS: gl.constexpr = x_tiles.shape[0] * x_tiles.shape[1]
    of_inputs: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    w_flat = gl.tuple([])
    for i in gl.static_range(len(w_tiles)):
        w_flat += (_flat_tiles(w_tiles[i]),)
    x_flat = x_tiles._reinterpret(x_tiles.dtype, [FIELDS, x_tiles.shape[2], WIDTH], of_inputs)
    return w_flat, x_flat


@gluon.constexpr_function
def bytes_of(planes):
    """That a stage's codes have."""
    return sum(plane.block_type.nbytes for plane in planes)


@gluon.jit
def ask_codes(planes, ring, tile, stage, step, BYTES: gl.constexpr):
    w_tiles, _, ready = ring
    mbarrier.expect(ready.index(stage), BYTES)
    first = step * planes[0].block_shape[0]
    if len(planes) == 1:
        place = w_tiles[0].index(stage)
        tma.async_copy_global_to_shared(planes[0], [first, tile, 0, 0], ready.index(stage), place)
    else:  # a slab's tiles of the low plane, then those of the high one
        HIGH_AT: gl.constexpr = planes[0].block_shape[1]
        low, high = w_tiles[0].index(stage), w_tiles[1].index(stage)
        tma.async_copy_global_to_shared(planes[0], [first, 0, tile, 0, 0], ready.index(stage), low)
        tma.async_copy_global_to_shared(
            planes[1], [first, HIGH_AT, tile, 0, 0], ready.index(stage), high
        )


@gluon.jit
def ask_inputs(x, ring, m_start, stage, step):
    _, x_tiles, ready = ring
    first = step * x.block_shape[0]
    place = x_tiles.index(stage)
    tma.async_copy_global_to_shared(x, [first, m_start, 0], ready.index(stage), place)


@gluon.jit
def ask_rest(sources, ring, m_start, tile, AHEAD: gl.constexpr, BYTES: gl.constexpr):
    """All stages' inputs, and the codes of those that were not asked for ahead."""
    x, planes = sources
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            ask_codes(planes, ring, tile, i, i, BYTES)
        ask_inputs(x, ring, m_start, i, i)


@gluon.constexpr_function
def _even(count):
    """The power of two that the rows of a tile of words are."""
    return 1 << (count - 1).bit_length()


@gluon.jit
def bring_scales(
    words, n_start, N, ROWS: gl.constexpr, TILE: gl.constexpr, COUNT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Shared memory [groups, TILE] to which all words of the program's rows are under way. The last
    ones of a tile are somebody else's."""
    ACROSS: gl.constexpr = TILE // 4 if TILE < 128 else 32  # threads that copy a row of words
    spread: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [num_warps, 1], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    kept = gl.allocate_shared_memory(gl.int32, [_even(COUNT), TILE], flat)
    group = gl.arange(0, _even(COUNT), gl.SliceLayout(1, spread))[:, None]
    row = gl.arange(0, TILE, gl.SliceLayout(0, spread))[None, :]
    cells = words + group * N + n_start + row
    async_copy.async_copy_global_to_shared(kept, cells, mask=(group < COUNT) & (row < ROWS))
    async_copy.commit_group()
    of_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return kept._reinterpret(gl.int32, [_even(COUNT), TILE], of_row)


@gluon.jit
def _anything_like(weight):
    """Registers that nobody wrote: for rows whose sums nobody stores."""
    return gl.inline_asm_elementwise(
        "// $0 stays as it is", "=r,r", [weight], dtype=weight.dtype, is_pure=True, pack=2
    )


@gluon.jit
def as_operand(weight, operand: gl.constexpr, SPARSE: gl.constexpr):
    """From the order of the codes to that of the inputs; nothing moves between registers."""
    ROWS: gl.constexpr = weight.shape[0]
    parts = weight.reshape([ROWS, 4, 4, 2, 2]).permute([0, 2, 3, 1, 4])
    return rows_as_operand(parts.reshape([ROWS, WIDTH]), operand, SPARSE)


@gluon.jit
def rows_as_operand(tile, operand: gl.constexpr, SPARSE: gl.constexpr):
    """Weights [rows, WIDTH] as the matrix unit's operand; nothing moves between registers.

    SPARSE: every other eight rows of the operand are none of the weight's."""
    ROWS: gl.constexpr = tile.shape[0]
    if SPARSE:
        both = gl.join(tile, _anything_like(tile)).reshape([ROWS // 8, 8, WIDTH, 2])
        tile = both.permute([0, 3, 1, 2]).reshape([2 * ROWS, WIDTH])
    return gl.convert_layout(tile, operand, assert_trivial=True)


@gluon.jit
def own_rows(total, SPARSE: gl.constexpr):
    """[rows of the tile, BLOCK_M] of what the matrix unit summed."""
    if SPARSE:
        ROWS: gl.constexpr = total.shape[0] // 2
        parts = total.reshape([ROWS // 8, 2, 8, total.shape[1]]).permute([0, 2, 3, 1])
        own, _ = parts.split()
        total = own.reshape([ROWS, own.shape[2]])
    return total


@gluon.constexpr_function
def lanes_of(rows, num_warps):
    """Which thread reads which bytes of a tile: 16 neighbouring ones of one row, or of two that are
    eight rows apart where there are as many."""
    is_sparse = rows < 16 * num_warps
    high = 8 if is_sparse else 16
    regs = [[0, 1], [0, 2], [0, 4], [0, 8]] + ([] if is_sparse else [[8, 0]])
    warps = [[high << bit, 0] for bit in range(num_warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=regs,
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[rows, 64],
    )


def described_inputs(x: Tensor, config: StreamPackedConfig) -> TensorDescriptor:
    """Rows of x as [fields, rows, inputs of a field]."""
    (m, k), wide = x.shape, WIDTH.value
    return TensorDescriptor(
        Memory(x.data_ptr(), x.dtype),
        [k // wide, m, wide],
        [wide, k, 1],
        [2 * config.slabs, config.block_m, wide],
        gl.NVMMASharedLayout(128, 16, rank=3),
    )

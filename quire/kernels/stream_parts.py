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
from quire.kernels.stream_packed_configs import FIELD, StreamPackedConfig, numbers_of_word
from quire.kernels.stream_unpack import code_pairs, power_pairs
from quire.kernels.stream_unpack_wide import byte_pairs, float_pairs, lane_value, table_pairs
from quire.kernels.unpack_scales import decoded

__all__ = [
    "WIDTH",
    "as_operand",
    "ask_codes",
    "ask_inputs",
    "ask_rest",
    "bring_scales",
    "described_inputs",
    "field_of",
    "flat_ring",
    "lanes_of",
    "make_ring",
    "own_rows",
    "own_value",
    "rows_as_operand",
]

WIDTH = gl.constexpr(FIELD)
_numbers_of_word = gluon.constexpr_function(numbers_of_word)


@gluon.jit
def make_ring(x, codes, STAGES: gl.constexpr):
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
def flat_ring(ring):
    """The same memory as slabs [rows, WIDTH] of codes and fields [BLOCK_M, WIDTH] of inputs."""
    w_tiles, x_tiles, _ = ring
    SLABS: gl.constexpr = w_tiles.shape[0] * w_tiles.shape[1] * w_tiles.shape[2]
    FIELDS: gl.constexpr = x_tiles.shape[0] * x_tiles.shape[1]
    of_codes: gl.constexpr = gl.NVMMASharedLayout(64, 8)
    of_inputs: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    w_flat = w_tiles._reinterpret(gl.uint8, [SLABS, w_tiles.shape[3], WIDTH], of_codes)
    x_flat = x_tiles._reinterpret(x_tiles.dtype, [FIELDS, x_tiles.shape[2], WIDTH], of_inputs)
    return w_flat, x_flat


@gluon.jit
def ask_codes(codes, ring, tile, stage, step, BYTES: gl.constexpr):
    w_tiles, _, ready = ring
    mbarrier.expect(ready.index(stage), BYTES)
    first = step * codes.block_shape[0]
    place = w_tiles.index(stage)
    tma.async_copy_global_to_shared(codes, [first, tile, 0, 0], ready.index(stage), place)


@gluon.jit
def ask_inputs(x, ring, m_start, stage, step):
    _, x_tiles, ready = ring
    first = step * x.block_shape[0]
    place = x_tiles.index(stage)
    tma.async_copy_global_to_shared(x, [first, m_start, 0], ready.index(stage), place)


@gluon.jit
def ask_rest(sources, ring, m_start, tile, AHEAD: gl.constexpr, BYTES: gl.constexpr):
    """All stages' inputs, and the codes of those that were not asked for ahead."""
    x, codes = sources
    STAGES: gl.constexpr = ring[2].shape[0]
    for i in gl.static_range(STAGES):
        if i >= AHEAD:
            ask_codes(codes, ring, tile, i, i, BYTES)
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
def _number(kept, group, PER: gl.constexpr, layout: gl.constexpr):
    """The bits of a group's number, for all rows."""
    word = kept.index(group // PER).load(layout)
    if PER > 1:
        WIDE: gl.constexpr = 32 // PER
        word = (word >> (group % PER * WIDE)) & ((1 << WIDE) - 1)
    return word


@gluon.jit
def own_value(table, KIND: gl.constexpr):
    """What `field_of` is given of a table; other forms have none."""
    return lane_value(table) if KIND == "table" else 0.0


@gluon.jit
def field_of(
    codes, kept, own, step, at: gl.constexpr,
    FIELDS: gl.constexpr, KIND: gl.constexpr, BITS: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """The field at a place of a step as floats, in the order of codes. `own`: see `own_value`."""
    PER: gl.constexpr = _numbers_of_word(SCALES, ZEROS)
    F: gl.constexpr = at % (8 // BITS)  # of the slab
    layout: gl.constexpr = codes.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    SPANS: gl.constexpr = 1 if GROUP >= WIDTH else WIDTH // GROUP  # groups of a field
    if GROUP > WIDTH:  # of whole pairs of fields, which then have the same words
        group = (step * (FIELDS // 2) + at // 2) // (GROUP // (2 * WIDTH))
    else:
        group = (step * FIELDS + at) * SPANS
    bits = _number(kept, group, PER, of_rows)[:, None]
    spot = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :] // 4 % 4  # which 16 inputs
    for i in gl.static_range(1, SPANS):
        more = _number(kept, group + i, PER, of_rows)[:, None]
        bits = gl.where(spot >= i * (GROUP // 16), more, bits)
    if KIND == "e2m1":
        scale, codes = gl.broadcast(decoded(bits, "power"), codes)
        weight = power_pairs(codes, scale, F)
    elif KIND == "table" or KIND == "e4m3":
        scale, codes = gl.broadcast(decoded(bits, SCALES), codes)
        if KIND == "table":
            weight = table_pairs(codes, own, scale, F, dtype)
        else:
            weight = float_pairs(codes, scale, dtype)
    else:
        scale = decoded(bits & 0xFFFF if ZEROS == "u16" else bits, SCALES)
        zero = ((bits >> 16) & 0xFFFF).to(gl.float32) if ZEROS == "u16" else bits * 0.0 + ZERO
        scale, codes = gl.broadcast(scale, codes)
        zero, codes = gl.broadcast(zero, codes)
        if BITS == 8:
            weight = byte_pairs(codes, zero, scale, dtype)
        else:
            weight = code_pairs(codes, zero, scale, F, dtype, SCALES)
    return weight


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

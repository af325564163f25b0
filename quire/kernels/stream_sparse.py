"""Matmul of few rows by a 2:4 weight on Hopper: values and places stream through shared memory, and
become the registers that the matrix unit reads.

The sum is that of `packed_kernel.py`, one chain of fp32 matrix-unit additions over increasing k,
with the zeros of the weight in it, so the bits are the same. The chip's own sparse instruction adds
32 inputs at a time and would round otherwise. Slabs are those of `slabs.sparse_in_lanes`; the rest
is as in `stream_packed.py`. Few rows of a narrow weight are summed in turns (`sparse_turns.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels import sparse_turns
from quire.kernels.chip import chip_of
from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind
from quire.kernels.rehearsal import Memory
from quire.kernels.slabs import Slabs
from quire.kernels.sparse_parts import (
    BITS,
    ask_rest_of_sparse,
    ask_sparse,
    flat_sparse,
    make_sparse_ring,
    operands_of,
)
from quire.kernels.stream_matmul import store_tile
from quire.kernels.stream_packed_configs import StreamPackedConfig
from quire.kernels.stream_parts import WIDTH, ask_inputs, described_inputs, own_rows
from quire.kernels.stream_sparse_configs import stream_sparse_ways

__all__ = ["StreamSparse"]

_BOX_ROWS = 64  # of bits: a box is no wider than 256 words


@gluon.jit
def _add_step(total, flat, stage, SLABS: gl.constexpr, num_warps: gl.constexpr):
    """total plus the products of a stage; none are under way then: see `stream_packed.py`."""
    w_flat, x_flat = flat
    SPARSE: gl.constexpr = total.shape[0] > w_flat[0].shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    for i in gl.static_range(SLABS):
        slab = stage * SLABS + i
        weights = operands_of(w_flat, slab, operand, SPARSE, num_warps)
        for f in gl.static_range(2):
            inputs = x_flat.index(slab * 2 + f).permute([1, 0])
            total = warpgroup_mma(weights[f], inputs, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit(do_not_specialize=["M"])
def stream_sparse_kernel(
    x,  # descriptor of [M, K], a box [2 * slabs, BLOCK_M, WIDTH]
    values,  # descriptor of [slabs, N / ROWS, ROWS, WIDTH], a box [slabs, 1, TILE, WIDTH]
    bits,  # descriptor of the words of as many rows, a box [slabs, 1 or 2, up to 256]
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
    OF_WEIGHT: gl.constexpr = values.block_type.nbytes + bits.block_type.nbytes
    BYTES: gl.constexpr = OF_WEIGHT + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        ask_sparse(weight, ring, tile, i, i, BYTES)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    ask_rest_of_sparse((x, weight), ring, m_start, tile, AHEAD, BYTES)
    SPARSE: gl.constexpr = 16 * num_warps > TILE
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    flat = flat_sparse(ring)
    total = gl.zeros([16 * num_warps, BLOCK_M], gl.float32, of_total)
    num_steps = K // (SLABS * 2 * WIDTH)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(ring[2].index(stage), i // STAGES & 1)
        total = _add_step(total, flat, stage, SLABS, num_warps)
        if i + STAGES < num_steps:
            ask_sparse(weight, ring, tile, stage, i + STAGES, BYTES)
            ask_inputs(x, ring, m_start, stage, i + STAGES)
    total = own_rows(total, SPARSE)
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_ym, ROWS, HAS_BIAS, GATE, num_warps)


_launch = Launcher(stream_sparse_kernel)


class StreamSparse:
    """Products by one 2:4 weight. Only where `has_hopper_kernels` and `can_stream_sparse`."""

    def __init__(self, slabs: Slabs, bias: Tensor | None, gate: str | None) -> None:
        assert slabs.values is not None and slabs.form.kind == "2:4", f"got {slabs.form}"
        self.slabs, self.values, self.bias, self.gate = slabs, slabs.values, bias, gate
        self.chip = chip_of(slabs.codes.device)
        self._boxes: dict[tuple[int, ...], tuple[TensorDescriptor, TensorDescriptor]] = {}
        # Weights are read before the wait, so what wrote them must be over by the first call.
        if slabs.codes.is_cuda:
            torch.cuda.current_stream(slabs.codes.device).synchronize()

    def __call__(self, x: Tensor, out: Tensor, config: StreamPackedConfig) -> None:
        """x [m, k] -> out [m, n], gated [m, n / 2]. An fp32 `out` [m, n] gets the sums, ungated."""
        launch = sparse_turns.launch if config.in_turns else _launch
        launch(*self._plan(x, out, config))

    def pick(self, m: int) -> StreamPackedConfig:
        return self.ways(m)[0]

    def ways(self, m: int) -> tuple[StreamPackedConfig, ...]:
        """To multiply m rows: one for each kernel that can, what is picked first."""
        return stream_sparse_ways(m, self.slabs.shape, self.chip)

    def _plan(
        self, x: Tensor, out: Tensor, config: StreamPackedConfig
    ) -> tuple[tuple[int, int, int], tuple[object, ...], dict[str, object], tuple[object, ...]]:
        """What `Launcher` takes."""
        (m, k), (n, num_in) = x.shape, self.slabs.shape
        of_step = 2 * WIDTH.value * config.slabs
        gate = self.gate if out.dtype == x.dtype else None
        assert k == num_in and x.is_contiguous() and out.stride(1) == 1, f"{x.shape=} {k=}"
        assert x.dtype == self.values.dtype, f"{x.dtype=} {self.values.dtype=}"
        assert n % config.rows == 0 and k % of_step == 0, f"{n=} {k=} {config=}"
        # Every copy must be waited for, or it outlives the program.
        assert 2 <= config.num_stages <= k // of_step, f"{k=} {config=}"
        m_tiles = ceil_div(m, config.block_m)
        return (
            (n // config.rows * m_tiles, 1, 1),
            (
                *(described_inputs(x, config), *self._described(config)),
                *(self.bias, out, m, k, out.stride(0)),
            ),
            {
                "ROWS": config.rows,
                "TILE": config.tile,
                "BLOCK_M": config.block_m,
                "M_TILES": m_tiles,
                "STAGES": config.num_stages,
                "AHEAD": config.num_ahead,
                "HAS_BIAS": self.bias is not None,
                "GATE": gate or "",
                **early_options(),
                "num_warps": 4 if config.in_turns else max(4, config.tile // 16),
            },
            (
                *(x.dtype, out.dtype, None if self.bias is None else self.bias.dtype),
                *(n, k, config.slabs),
                alignments(out, self.bias), int_kind(out.stride(0)),
            ),
        )  # fmt: skip

    def _described(self, config: StreamPackedConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Values as [slabs, programs, rows of a program, values], bits as [slabs, programs,
        words of those]: a box higher than a program's rows finds nothing below them."""
        key = (config.rows, config.tile, config.slabs)
        found = self._boxes.get(key)
        if found is None:
            found = self._boxes[key] = (self._values_of(config), self._bits_of(config))
        return found

    def _values_of(self, config: StreamPackedConfig) -> TensorDescriptor:
        (n, k), wide = self.slabs.shape, WIDTH.value
        return TensorDescriptor(
            Memory(self.values.data_ptr(), self.values.dtype),
            [k // (2 * wide), n // config.rows, config.rows, wide],
            [n * wide, config.rows * wide, wide, 1],
            [config.slabs, 1, config.tile, wide],
            gl.NVMMASharedLayout(128, 16, rank=4),
        )

    def _bits_of(self, config: StreamPackedConfig) -> TensorDescriptor:
        (n, k), words = self.slabs.shape, BITS.value
        boxes = ceil_div(config.tile, _BOX_ROWS)
        rows = config.rows // boxes
        assert boxes == 1 or rows == _BOX_ROWS, f"{config=}"
        return TensorDescriptor(
            Memory(self.slabs.codes.data_ptr(), torch.int32),
            [k // (2 * WIDTH.value), n // rows, rows * words],
            [n * words, rows * words, 1],
            [config.slabs, boxes, config.tile // boxes * words],
            gl.NVMMASharedLayout(0, 32, rank=3),
        )

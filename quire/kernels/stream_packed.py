"""Matmul of few rows by a packed weight on Hopper: codes stream through shared memory, and become
floats in the very registers that the matrix unit reads.

The sum is that of `packed_kernel.py`, one chain of fp32 matrix-unit additions over increasing k, so
the bits are the same. The copy engine brings codes from the slabs (`slabs.py`) and inputs; scales
of all groups of a program's rows are brought at its start. All of a weight is asked for before the
inputs are there, as in `stream_matmul.py`. Few rows of a narrow weight are summed in turns
(`stream_turns.py`).
"""

from __future__ import annotations

import torch
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

from quire.kernels import stream_turns
from quire.kernels.chip import chip_of
from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind
from quire.kernels.rehearsal import Memory
from quire.kernels.slabs import Slabs
from quire.kernels.stream_fields import field_of, own_value
from quire.kernels.stream_form import StreamForm
from quire.kernels.stream_matmul import store_tile
from quire.kernels.stream_packed_configs import StreamPackedConfig, stream_packed_ways
from quire.kernels.stream_parts import (
    WIDTH,
    as_operand,
    ask_codes,
    ask_inputs,
    ask_rest,
    bring_scales,
    bytes_of,
    described_inputs,
    flat_ring,
    lanes_of,
    make_ring,
    own_rows,
)

__all__ = ["StreamPacked"]


@gluon.jit
def _add_step(
    total, flat, own, kept, step, stage, FIELDS: gl.constexpr, FORM: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """total plus the products of a stage: unpacking a field goes on while the one before is
    multiplied. With products under way at the end of a loop's body the compiler would wait for
    each of them, so none are."""
    w_flat, x_flat = flat
    TILE: gl.constexpr = w_flat[0].shape[1]
    SPARSE: gl.constexpr = total.shape[0] > TILE
    operand: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 2)
    lanes: gl.constexpr = lanes_of(TILE, total.shape[0] // 16)
    for f in gl.static_range(FIELDS):
        weight = field_of(w_flat, lanes, own, kept, step, stage, f, FIELDS, FORM, dtype)
        inputs = x_flat.index(stage * FIELDS + f).permute([1, 0])
        total = warpgroup_mma(as_operand(weight, operand, SPARSE), inputs, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit(do_not_specialize=["M"])
def stream_packed_kernel(
    x,  # descriptor of [M, K], a box [FIELDS, BLOCK_M, WIDTH]
    codes,  # descriptor of [slabs, N / ROWS, ROWS, WIDTH] bytes, a box of a stage's slabs; with a
    # high plane of [slabs, tiles, N / ROWS, ROWS, WIDTH], a box of the tiles with low bits
    high,  # None, or of the same, a box of the tiles with high bits
    words,  # of the form's numbers beside the codes [FORM.count, N]
    table,  # what codes stand for, if the form says so
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
    BYTES: gl.constexpr = bytes_of(planes) + x.block_type.nbytes
    for i in gl.static_range(AHEAD):
        ask_codes(planes, ring, tile, i, i, BYTES)
    kept = bring_scales(words, tile * ROWS, N, ROWS, TILE, FORM.count, num_warps)
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    ask_rest((x, planes), ring, m_start, tile, AHEAD, BYTES)
    async_copy.wait_group(0)
    SPARSE: gl.constexpr = 16 * num_warps > TILE
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    flat = flat_ring(ring)
    own = own_value(table, FORM)
    total = gl.zeros([16 * num_warps, BLOCK_M], gl.float32, of_total)
    num_steps = K // (FIELDS * WIDTH)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(ring[2].index(stage), i // STAGES & 1)
        total = _add_step(total, flat, own, kept, i, stage, FIELDS, FORM, DTYPE)
        if i + STAGES < num_steps:
            ask_codes(planes, ring, tile, stage, i + STAGES, BYTES)
            ask_inputs(x, ring, m_start, stage, i + STAGES)
    total = own_rows(total, SPARSE)
    store_tile(total, y, bias, m_start, tile * ROWS, M, stride_ym, ROWS, HAS_BIAS, GATE, num_warps)


_launch = Launcher(stream_packed_kernel)


class StreamPacked:
    """Products by one packed weight. Only where `has_hopper_kernels` and `can_stream`."""

    def __init__(self, slabs: Slabs, bias: Tensor | None, gate: str | None) -> None:
        self.slabs, self.words, self.bias, self.gate = slabs, slabs.words, bias, gate
        self.table = self.words if slabs.values is None else slabs.values  # or none that is read
        self.form, self.chip = StreamForm.of(slabs), chip_of(self.words.device)
        self._boxes: dict[tuple[int, ...], tuple[TensorDescriptor, TensorDescriptor | None]] = {}
        # Weights are read before the wait, so what wrote them must be over by the first call.
        if slabs.codes.is_cuda:
            torch.cuda.current_stream(slabs.codes.device).synchronize()

    def __call__(self, x: Tensor, out: Tensor, config: StreamPackedConfig) -> None:
        """x [m, k] -> out [m, n], gated [m, n / 2]. An fp32 `out` [m, n] gets the sums, ungated."""
        launch = stream_turns.launch if config.in_turns else _launch
        launch(*self._plan(x, out, config))

    def pick(self, m: int) -> StreamPackedConfig:
        return self.ways(m)[0]

    def ways(self, m: int) -> tuple[StreamPackedConfig, ...]:
        """To multiply m rows: one for each kernel that can, what is picked first."""
        form = self.slabs.form
        of_form = (form.bits, form.fields)
        return stream_packed_ways(m, self.slabs.shape, len(self.words), self.chip, *of_form)

    def _plan(
        self, x: Tensor, out: Tensor, config: StreamPackedConfig
    ) -> tuple[tuple[int, int, int], tuple[object, ...], dict[str, object], tuple[object, ...]]:
        """What `Launcher` takes."""
        (m, k), (n, num_in) = x.shape, self.slabs.shape
        of_step = 2 * WIDTH.value * config.slabs
        gate = self.gate if out.dtype == x.dtype else None
        assert k == num_in and x.is_contiguous() and out.stride(1) == 1, f"{x.shape=} {k=}"
        assert n % config.rows == 0 and k % of_step == 0, f"{n=} {k=} {config=}"
        # Every copy must be waited for, or it outlives the program.
        assert 2 <= config.num_stages <= k // of_step, f"{k=} {config=}"
        m_tiles = ceil_div(m, config.block_m)
        described = (described_inputs(x, config), *self._described(config))
        return (
            (n // config.rows * m_tiles, 1, 1),
            (*described, self.words, self.table, self.bias, out, m, n, k, out.stride(0)),
            {
                "FORM": self.form,
                "ROWS": config.rows,
                "TILE": config.tile,
                "BLOCK_M": config.block_m,
                "M_TILES": m_tiles,
                "STAGES": config.num_stages,
                "AHEAD": config.num_ahead,
                "HAS_BIAS": self.bias is not None,
                "GATE": gate or "",
                **early_options(next_has_inputs=out.dtype == torch.float32),
                "num_warps": 4 if config.in_turns else max(4, config.tile // 16),
            },
            (
                *(x.dtype, out.dtype, None if self.bias is None else self.bias.dtype),
                *(n, k, config.slabs),
                alignments(out, self.bias, self.words), int_kind(out.stride(0)),
            ),
        )  # fmt: skip

    def _described(
        self, config: StreamPackedConfig
    ) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        """The planes of codes, in programs and rows of a program: a box higher than a program's
        rows finds nothing below them."""
        key = (config.rows, config.tile, config.slabs)
        found = self._boxes.get(key)
        if found is None:
            high = self.form.high_tiles
            low = self._plane(config, self.form.low_tiles)
            found = self._boxes[key] = (low, self._plane(config, high) if high else None)
        return found

    def _plane(self, config: StreamPackedConfig, tiles: int) -> TensorDescriptor:
        """Boxes of so many tiles of each slab of a stage."""
        (n, k), codes, form, wide = self.slabs.shape, self.slabs.codes, self.form, WIDTH.value
        all_tiles = form.low_tiles + form.high_tiles
        slabs, of_stage = k // (form.fields * wide), 2 * config.slabs // form.fields
        shape = [slabs, all_tiles, n // config.rows, config.rows, wide]
        strides = [all_tiles * n * wide, n * wide, config.rows * wide, wide, 1]
        box = [of_stage, tiles, 1, config.tile, wide]
        if all_tiles == 1:  # one dimension less
            shape, strides, box = ([*x[:1], *x[2:]] for x in (shape, strides, box))
        layout = gl.NVMMASharedLayout(64, 8, rank=len(shape))
        return TensorDescriptor(Memory(codes.data_ptr(), torch.uint8), shape, strides, box, layout)

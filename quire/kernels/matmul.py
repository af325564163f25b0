"""Batch-invariant matmul: y = x @ w.T + bias whose rows do not depend on their neighbours.

Every output is the same sum in the same order whatever the batch: one chain of fp32 matrix-unit
additions from zero over increasing k. Tiles and stages may then follow the batch size freely,
because none of them touches that order; libraries that cut k by batch size cannot promise this.
Tile choice lives in `matmul_configs.py`, the device code in `matmul_kernel.py`. Few rows on Hopper
go to `stream_matmul.py`, many rows to the vendor's library where it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.chip import chip_of
from quire.kernels.early import early_options
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.launch import Launcher, alignments
from quire.kernels.matmul_configs import TileConfig, pick_config
from quire.kernels.matmul_kernel import matmul_kernel
from quire.kernels.silu_mul import silu_mul
from quire.kernels.vendor_matmul import agrees, is_faster, vendor_matmul

if TYPE_CHECKING:
    from quire.kernels.stream_matmul import StreamMatmul

__all__ = ["KernelCall", "Layouts", "PreparedMatmul", "interleave", "matmul", "plan_matmul"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The kernel launch of a product, without its tensors."""

    grid: tuple[int, int, int]
    config: TileConfig
    options: Mapping[str, object]


class Layouts:
    """The layout of each shape's product, shared by the layers of a model.

    Also knows whether the vendor's library may compute a shape."""

    def __init__(self, use_library: bool = True) -> None:
        self.use_library = use_library
        self.of: dict[tuple[object, ...], Layout] = {}
        self._agreed: dict[tuple[object, ...], bool] = {}

    def may_ask_library(self, w: Tensor, bias: Tensor | None) -> bool:
        """Whether the library gives our bits for this shape; checked once for each shape."""
        key = (*w.shape, w.dtype, bias is None)
        if key not in self._agreed:
            self._agreed[key] = self.use_library and agrees(w, bias, lambda x: matmul(x, w, bias))
        return self._agreed[key]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch with its tensors, ready to run, or to compile ahead of the first run."""

    layout: Layout
    args: tuple[object, ...]
    kind: tuple[object, ...]

    def run(self) -> None:
        _launch(self.layout.grid, self.args, self.layout.options, self.kind)

    def compile(self) -> object:
        return matmul_kernel.warmup(*self.args, grid=self.layout.grid, **self.layout.options)


_launch = Launcher(matmul_kernel)

_FP32_CONFIG = TileConfig(32, 32, 32, 2, 4)  # no matrix unit: for tests, not for speed
_MAX_LAYOUTS = 1 << 16


class PreparedMatmul:
    """`matmul` by one weight; whatever does not change between calls is prepared once."""

    def __init__(
        self, w: Tensor, bias: Tensor | None, layouts: Layouts, gate: str | None = None
    ) -> None:
        self.w, self.bias, self.layouts, self.gate = w, bias, layouts, gate
        self._units = chip_of(w.device).units
        self._is_plain = w.is_contiguous() and _alignment(w, bias)
        self._may_ask_library = self._is_plain and layouts.may_ask_library(w, bias)
        self._stream = _streamed(w, bias, gate) if self._is_plain else None
        self._descriptors: dict[TileConfig, TensorDescriptor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n], in x's dtype; gated [m, n / 2]."""
        w, bias = self.w, self.bias
        (m, k), n = x.shape, w.shape[0]
        is_alike = x.dtype == w.dtype  # if not, `matmul` says what is wrong
        is_plain = self._is_plain and is_alike and x.is_contiguous() and x.data_ptr() % 16 == 0
        stream = self._stream if is_plain else None
        portions = stream.pick(m) if stream is not None else None
        may_ask = self._may_ask_library and is_plain and portions is None
        if may_ask and is_faster(m, n, k, self.gate is not None, self._units):
            out = vendor_matmul(x, w, bias, torch.empty(m, n, dtype=x.dtype, device=x.device))
            return silu_mul(out, self.gate, interleaved=True) if self.gate else out
        out = torch.empty(m, n // 2 if self.gate else n, dtype=x.dtype, device=x.device)
        if m == 0:
            return out
        if stream is not None and portions is not None:
            stream(x, out, portions)
            return out
        if not is_plain:
            return matmul(x, w, bias, out, gate=self.gate)
        key = (m, n, k, x.dtype, self.gate, bias is None)
        layout = self.layouts.of.get(key)
        if layout is None:
            if len(self.layouts.of) >= _MAX_LAYOUTS:
                self.layouts.of.clear()
            layout = self.layouts.of[key] = _layout(m, w, bias, None, True, self.gate)
        bind(layout, x, w, bias, out, self._descriptor(layout.config)).run()
        return out

    def sums(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n] in fp32: what is rounded once and gated elsewhere, pairs as they lie."""
        m, stream = len(x), self._stream
        out = torch.empty(m, self.w.shape[0], dtype=torch.float32, device=x.device)
        is_plain = x.is_contiguous() and x.data_ptr() % 16 == 0
        portions = stream.pick(m) if stream is not None and is_plain and m else None
        if stream is not None and portions is not None:
            stream(x, out, portions)
            return out
        return matmul(x, self.w, self.bias, out)

    def _descriptor(self, config: TileConfig) -> TensorDescriptor | None:
        if not config.tma:
            return None
        found = self._descriptors.get(config)
        if found is None:
            found = self._descriptors[config] = _describe(self.w, config.block_n, config.block_k)
        return found


def _streamed(w: Tensor, bias: Tensor | None, gate: str | None) -> StreamMatmul | None:
    """The kernel for few rows; None where it cannot run."""
    if w.dtype not in (torch.bfloat16, torch.float16) or not has_hopper_kernels(w.device):
        return None
    from quire.kernels.stream_matmul import StreamMatmul

    return StreamMatmul(w, bias, gate)


def interleave(w: Tensor) -> Tensor:
    """[2 * f, ...] gate rows, then up rows -> gate, up, gate, up ..., as a gated product wants."""
    gate, up = w.chunk(2)
    return torch.stack((gate, up), 1).flatten(0, 1)


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: TileConfig | None = None,
    *,
    gate: str | None = None,
) -> Tensor:
    """x [m, k] @ w [n, k].T + bias [n] -> [m, n] in x's dtype, summed in fp32.

    The bits of a row depend on that row, w and bias alone. An fp32 `out` gets the sums.
    """
    if out is None:
        width = w.shape[0] // 2 if gate else w.shape[0]
        out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        plan_matmul(x, w, bias, out, config, gate).run()
    return out


def plan_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: TileConfig | None = None,
    gate: str | None = None,
) -> KernelCall:
    """The launch behind `matmul`."""
    m, k = x.shape
    assert w.shape[1] == k and k % 16 == 0, f"got x {tuple(x.shape)}, w {tuple(w.shape)}"
    assert x.dtype == w.dtype, f"got {x.dtype}, {w.dtype}"
    assert out.dtype == x.dtype or (out.dtype == torch.float32 and not gate), f"got {out.dtype}"
    assert x.stride(1) == w.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    layout = _layout(m, w, bias, config, _alignment(x) and _alignment(w), gate)
    if out.dtype == torch.float32:
        options = {**layout.options, **early_options(next_has_inputs=True)}
        layout = replace(layout, options=options)
    return bind(layout, x, w, bias, out, None)


def bind(
    layout: Layout,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    w_descriptor: TensorDescriptor | None,
) -> KernelCall:
    """A layout with its tensors. The weight's descriptor may be given, to be made only once."""
    (m, k), n, config = x.shape, w.shape[0], layout.config
    kind_of_bias = None if bias is None else bias.dtype
    strides = (x.stride(0), w.stride(0), out.stride(0))
    x_rows: object = x
    w_rows: object = w
    if config.tma:
        x_rows = _describe(x, config.block_m, config.block_k)
        w_rows = w_descriptor or _describe(w, config.block_n, config.block_k)
    return KernelCall(
        layout,
        (x_rows, w_rows, bias, out, m, n, k, *strides),
        (x.dtype, out.dtype, kind_of_bias, n, k, strides, alignments(x, w, out, bias)),
    )


def _describe(rows: Tensor, block: int, block_k: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [block, block_k])


def _alignment(*tensors: Tensor | None) -> bool:
    """Whether tensor descriptors and 16-byte loads may read them."""
    return all(
        t.data_ptr() % 16 == 0 and (t.ndim < 2 or t.stride(0) * t.element_size() % 16 == 0)
        for t in tensors
        if t is not None
    )


def _layout(
    m: int,
    w: Tensor,
    bias: Tensor | None,
    config: TileConfig | None,
    aligned: bool,
    gate: str | None,
) -> Layout:
    """How m rows are multiplied by a weight of this shape."""
    n, k = w.shape
    if config is None:
        is_wide = w.dtype == torch.float32
        config = _FP32_CONFIG if is_wide else pick_config(m, n, k, chip_of(w.device))
    is_even = k % config.block_k == 0
    if config.tma and not (aligned and is_even):
        config = replace(config, tma=False)
    return Layout(
        grid=(-(-m // config.block_m) * -(-n // config.block_n), 1, 1),
        config=config,
        options={
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "EVEN_K": is_even,
            "SWAP": config.swap,
            "TMA": config.tma,
            "HAS_BIAS": bias is not None,
            "GATE": gate or "",
            **early_options(),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        },
    )

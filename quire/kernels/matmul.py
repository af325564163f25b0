"""Batch-invariant matmul: y = x @ w.T + bias whose rows do not depend on their neighbours.

Every output is the same sum in the same order whatever the batch: k is cut into ranges fixed by
the weight's shape (`split_plan`), each range is one chain of fp32 matrix-unit additions from zero
in increasing k, and the ranges are added in order. Tiles, stages and who adds the ranges may then
follow the batch size freely, because none of them touches that order; libraries that pick split-k
by batch size cannot promise this. Tile choice lives in `matmul_configs.py`, the device code in
`matmul_kernel.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.launch import Launcher
from quire.kernels.matmul_configs import SplitPlan, TileConfig, pick_config, split_plan
from quire.kernels.matmul_kernel import matmul_kernel, reduce_kernel

__all__ = ["KernelCall", "MatmulWorkspace", "PreparedMatmul", "matmul", "plan_matmul"]


class MatmulWorkspace:
    """Partial sums and arrival counters, at addresses that captured graphs may keep.

    One workspace serves one stream: two matmuls that may overlap need two workspaces. It also
    remembers how products of each shape are laid out, which layers of one shape share.
    """

    def __init__(
        self, device: torch.device | str, max_partials: int = 1 << 23, max_tiles: int = 1 << 14
    ) -> None:
        self.partials = torch.empty(max_partials, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_tiles, dtype=torch.int32, device=device)
        self.layouts: dict[tuple[int, int, int, torch.dtype], list[Layout]] = {}

    def max_rows(self, n: int, num_planes: int) -> int:
        """Rows of n partial sums that fit, times the planes of a split product."""
        return self.partials.numel() // (n * num_planes)


@dataclass(frozen=True, slots=True)
class Layout:
    """One kernel launch of a product, without its tensors."""

    launch: Launcher
    start: int  # rows of x
    stop: int
    grid: tuple[int, int, int]
    config: TileConfig
    split_len: int
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch with its tensors, ready to run, or to compile ahead of the first run."""

    layout: Layout
    args: tuple[object, ...]
    kind: tuple[object, ...]

    def run(self) -> None:
        self.layout.launch(self.layout.grid, self.args, self.layout.options, self.kind)

    def compile(self) -> object:
        layout = self.layout
        return layout.launch.kernel.warmup(*self.args, grid=layout.grid, **layout.options)


_launch_product, _launch_reduction = Launcher(matmul_kernel), Launcher(reduce_kernel)

# Weight bytes per program asked for ahead of the wait, when launched early.
_PREFETCH_BYTES = 64 * 1024
_REDUCE_BLOCK_N = 1024
_FP32_CONFIG = TileConfig(32, 32, 32, 2, 4)  # no matrix unit: for tests, not for speed
_MAX_LAYOUTS = 1 << 16


class PreparedMatmul:
    """`matmul` by one weight, with all that does not change between calls worked out once."""

    def __init__(self, w: Tensor, bias: Tensor | None, workspace: MatmulWorkspace) -> None:
        self.w, self.bias, self.workspace = w, bias, workspace
        self.plan = split_plan(*w.shape)
        self._is_plain = w.is_contiguous() and _alignment(w, bias)
        self._descriptors: dict[TileConfig, TensorDescriptor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n], in x's dtype."""
        w, bias, space = self.w, self.bias, self.workspace
        (m, k), n = x.shape, w.shape[0]
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        if m == 0:
            return out
        if not (self._is_plain and x.is_contiguous() and x.data_ptr() % 16 == 0):
            return matmul(x, w, bias, out, workspace=space)
        key = (m, n, k, x.dtype)
        layouts = space.layouts.get(key)
        if layouts is None:
            if len(space.layouts) >= _MAX_LAYOUTS:
                space.layouts.clear()
            layouts = space.layouts[key] = plan_layouts(m, w, bias, self.plan, None, space, True)
        for layout in layouts:
            rows, to = x, out
            if layout.stop - layout.start != m:
                rows, to = x[layout.start : layout.stop], out[layout.start : layout.stop]
            bind(layout, rows, w, bias, to, space, self._descriptor(layout.config)).run()
        return out

    def _descriptor(self, config: TileConfig) -> TensorDescriptor | None:
        if not config.tma:
            return None
        found = self._descriptors.get(config)
        if found is None:
            found = self._descriptors[config] = _describe(self.w, config.block_n, config.block_k)
        return found


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: TileConfig | None = None,
    *,
    workspace: MatmulWorkspace | None = None,
) -> Tensor:
    """x [m, k] @ w [n, k].T + bias [n] -> [m, n] in x's dtype, summed in fp32.

    The bits of a row depend on that row, w and bias alone. Without a workspace (or with one too
    small) each tile's splits are added by one program: the same bits, slower for few rows.
    """
    if out is None:
        out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0] > 0:
        plan = split_plan(w.shape[0], w.shape[1])
        for call in plan_matmul(x, w, bias, out, plan, config, workspace):
            call.run()
    return out


def plan_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    plan: SplitPlan,
    config: TileConfig | None = None,
    workspace: MatmulWorkspace | None = None,
) -> list[KernelCall]:
    """The launches behind `matmul`. The plan is an argument for benchmarks; models leave it be."""
    m, k = x.shape
    assert w.shape[1] == k and k % 16 == 0, f"got x {tuple(x.shape)}, w {tuple(w.shape)}"
    assert x.dtype == w.dtype == out.dtype, f"got {x.dtype}, {w.dtype}, {out.dtype}"
    assert x.stride(1) == w.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    aligned = _alignment(x) and _alignment(w)
    layouts = plan_layouts(m, w, bias, plan, config, workspace, aligned)
    calls = []
    for layout in layouts:
        rows, to = x[layout.start : layout.stop], out[layout.start : layout.stop]
        calls.append(bind(layout, rows, w, bias, to, workspace, None))
    return calls


def plan_layouts(
    m: int,
    w: Tensor,
    bias: Tensor | None,
    plan: SplitPlan,
    config: TileConfig | None,
    workspace: MatmulWorkspace | None,
    aligned: bool,
) -> list[Layout]:
    """How m rows are multiplied by a weight of this shape."""
    n, k = w.shape
    if config is None:
        config = _FP32_CONFIG if w.dtype == torch.float32 else pick_config(m, n, k)
    config = _fit(config, m, w, plan, workspace, aligned)
    if config.reduce == "park":  # as many rows at a time as the scratch holds
        assert workspace is not None
        step = workspace.max_rows(n, plan.num_splits - 1) // config.block_m * config.block_m
        return [_product(i, min(i + step, m), w, bias, plan, config) for i in range(0, m, step)]
    product = _product(0, m, w, bias, plan, config)
    if config.reduce != "kernel":
        return [product]
    return [product, _reduction(m, n, bias, plan, config)]


def bind(
    layout: Layout,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    workspace: MatmulWorkspace | None,
    w_descriptor: TensorDescriptor | None,
) -> KernelCall:
    """A layout with its tensors. The weight's descriptor may be given, to be made only once."""
    m, n = out.shape
    config = layout.config
    kind_of_bias = None if bias is None else bias.dtype
    pointers = x.data_ptr() | w.data_ptr() | out.data_ptr()
    is_aligned = (pointers if bias is None else pointers | bias.data_ptr()) % 16 == 0
    if layout.launch is _launch_reduction:
        assert workspace is not None
        args: tuple[object, ...] = (workspace.partials, bias, out, m, n, out.stride(0))
        return KernelCall(layout, args, (out.dtype, kind_of_bias, n, out.stride(0), is_aligned))
    k, strides = x.shape[1], (x.stride(0), w.stride(0), out.stride(0))
    x_rows: object = x
    w_rows: object = w
    if config.tma:
        x_rows = _describe(x, config.block_m, config.block_k)
        w_rows = w_descriptor or _describe(w, config.block_n, config.block_k)
    scratch = (None, None) if workspace is None else (workspace.partials, workspace.counters)
    return KernelCall(
        layout,
        (x_rows, w_rows, bias, out, *scratch, m, n, k, layout.split_len, *strides),
        (x.dtype, kind_of_bias, n, k, layout.split_len, strides, workspace is None, is_aligned),
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


def _product(
    start: int, stop: int, w: Tensor, bias: Tensor | None, plan: SplitPlan, config: TileConfig
) -> Layout:
    n, k = w.shape
    tiles = -(-(stop - start) // config.block_m) * -(-n // config.block_n)
    is_split = config.reduce in ("last", "kernel")
    return Layout(
        launch=_launch_product,
        start=start,
        stop=stop,
        grid=(tiles, plan.num_splits if is_split else 1, 1),
        config=config,
        split_len=plan.split_len,
        options={
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "SPLITS": plan.num_splits,
            "REDUCE": config.reduce,
            "EVEN_K": _is_even(config, plan, k),
            "SWAP": config.swap,
            "TMA": config.tma,
            "WS": config.specialize,
            "PDL": config.pdl,
            "PREFETCH": _prefetch_columns(config, w, plan),
            "LANES": 32 * config.num_warps,
            "HAS_BIAS": bias is not None,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **({"launch_pdl": True} if config.pdl else {}),
        },
    )


def _reduction(m: int, n: int, bias: Tensor | None, plan: SplitPlan, config: TileConfig) -> Layout:
    return Layout(
        launch=_launch_reduction,
        start=0,
        stop=m,
        grid=(-(-n // _REDUCE_BLOCK_N), m, 1),
        config=config,
        split_len=plan.split_len,
        options={
            "SPLITS": plan.num_splits,
            "BLOCK_N": _REDUCE_BLOCK_N,
            "PDL": config.pdl,
            "HAS_BIAS": bias is not None,
            **({"launch_pdl": True} if config.pdl else {}),
        },
    )


def _fit(
    config: TileConfig,
    m: int,
    w: Tensor,
    plan: SplitPlan,
    workspace: MatmulWorkspace | None,
    aligned: bool,
) -> TileConfig:
    """The config less what these operands cannot have; each step down keeps the bits."""
    n, k = w.shape
    if config.reduce != "loop":
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        if workspace is None or plan.num_splits == 1:
            has_room = False
        elif config.reduce == "park":
            has_room = workspace.max_rows(n, plan.num_splits - 1) >= config.block_m
        else:
            has_room = workspace.max_rows(n, plan.num_splits) >= m
            has_room = has_room and tiles <= workspace.counters.numel()
        if not has_room:
            config = replace(config, reduce="loop")
    if config.tma and not (aligned and _is_even(config, plan, k)):
        config = replace(config, tma=False)
    if config.specialize and not (config.tma and plan.num_splits == 1):
        config = replace(config, specialize=False)
    return config


def _is_even(config: TileConfig, plan: SplitPlan, k: int) -> bool:
    return plan.split_len % config.block_k == 0 and k % config.block_k == 0


def _prefetch_columns(config: TileConfig, w: Tensor, plan: SplitPlan) -> int:
    """Columns of each weight row to ask for early: 0 where threads cannot share rows evenly."""
    lanes = 32 * config.num_warps
    columns = min(_PREFETCH_BYTES // (w.element_size() * config.block_n), plan.split_len)
    is_shared = config.block_n <= lanes and columns % (lanes // config.block_n * 8) == 0
    is_inside = w.shape[1] % plan.split_len == 0
    return columns if config.pdl and not config.tma and is_shared and is_inside else 0

"""Batch-invariant matmul: y = x @ w.T + bias whose rows do not depend on their neighbours.

Every output is the same sum in the same order whatever the batch: k is cut into ranges fixed by
the weight's shape (`split_plan`), each range is one chain of fp32 matrix-unit additions from zero
in increasing k, and the ranges are added in order. Tiles, stages and who adds the ranges may then
follow the batch size freely, because none of them touches that order; libraries that pick split-k
by batch size cannot promise this. Tile choice lives in `matmul_configs.py`, the device code in
`matmul_kernel.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.matmul_configs import SplitPlan, TileConfig, pick_config, split_plan
from quire.kernels.matmul_kernel import matmul_kernel, reduce_kernel

__all__ = ["KernelCall", "MatmulWorkspace", "matmul", "plan_matmul"]


class MatmulWorkspace:
    """Partial sums and arrival counters, at addresses that captured graphs may keep.

    One workspace serves one stream: two matmuls that may overlap need two workspaces.
    """

    def __init__(
        self, device: torch.device | str, max_partials: int = 1 << 23, max_tiles: int = 1 << 14
    ) -> None:
        self.partials = torch.empty(max_partials, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_tiles, dtype=torch.int32, device=device)

    def max_rows(self, n: int, num_planes: int) -> int:
        """Rows of n partial sums that fit, times the planes of a split product."""
        return self.partials.numel() // (n * num_planes)


class Kernel(Protocol):
    """The two things done with a Triton kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def warmup(self, *args: object, grid: tuple[int, ...], **options: object) -> object: ...


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One kernel launch, ready to run, or to compile ahead of the first run."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[object, ...]
    options: Mapping[str, object]

    def run(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> object:
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


# Weight bytes per program asked for ahead of the wait, when launched early.
_PREFETCH_BYTES = 64 * 1024
_REDUCE_BLOCK_N = 1024
_FP32_CONFIG = TileConfig(32, 32, 32, 2, 4)  # no matrix unit: for tests, not for speed


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
    n = w.shape[0]
    assert w.shape[1] == k and k % 16 == 0, f"got x {tuple(x.shape)}, w {tuple(w.shape)}"
    assert x.dtype == w.dtype == out.dtype, f"got {x.dtype}, {w.dtype}, {out.dtype}"
    assert x.stride(1) == w.stride(1) == out.stride(1) == 1, "rows must be contiguous"
    if config is None:
        config = _FP32_CONFIG if x.dtype == torch.float32 else pick_config(m, n, k)
    config = _fit(config, x, w, plan, workspace)
    if config.reduce == "loop":
        return [_product(x, w, bias, out, plan, config, None)]
    assert workspace is not None
    if config.reduce == "park":  # as many rows at a time as the scratch holds
        step = workspace.max_rows(n, plan.num_splits - 1) // config.block_m * config.block_m
        return [
            _product(x[i : i + step], w, bias, out[i : i + step], plan, config, workspace)
            for i in range(0, m, step)
        ]
    product = _product(x, w, bias, out, plan, config, workspace)
    if config.reduce == "last":
        return [product]
    return [product, _reduction(bias, out, plan, config, workspace)]


def _product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    plan: SplitPlan,
    config: TileConfig,
    workspace: MatmulWorkspace | None,
) -> KernelCall:
    m, k = x.shape
    n = w.shape[0]
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    is_split = config.reduce in ("last", "kernel")
    return KernelCall(
        kernel=matmul_kernel,
        grid=(tiles, plan.num_splits if is_split else 1),
        args=(
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]) if config.tma else x,
            TensorDescriptor.from_tensor(w, [config.block_n, config.block_k]) if config.tma else w,
            bias, out,
            workspace.partials if workspace else None,
            workspace.counters if workspace else None,
            m, n, k, plan.split_len, x.stride(0), w.stride(0), out.stride(0),
        ),
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
    )  # fmt: skip


def _reduction(
    bias: Tensor | None,
    out: Tensor,
    plan: SplitPlan,
    config: TileConfig,
    workspace: MatmulWorkspace,
) -> KernelCall:
    m, n = out.shape
    return KernelCall(
        kernel=reduce_kernel,
        grid=(-(-n // _REDUCE_BLOCK_N), m),
        args=(workspace.partials, bias, out, m, n, out.stride(0)),
        options={
            "SPLITS": plan.num_splits,
            "BLOCK_N": _REDUCE_BLOCK_N,
            "PDL": config.pdl,
            "HAS_BIAS": bias is not None,
            **({"launch_pdl": True} if config.pdl else {}),
        },
    )


def _fit(
    config: TileConfig, x: Tensor, w: Tensor, plan: SplitPlan, workspace: MatmulWorkspace | None
) -> TileConfig:
    """The config less what these operands cannot have; each step down keeps the bits."""
    m, k = x.shape
    n = w.shape[0]
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
    if config.tma:
        is_aligned = all(
            t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in (x, w)
        )
        if not (is_aligned and _is_even(config, plan, k)):
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

"""The batch-invariant matmul without a GPU: indexing, masks, splits and their reduction.

Runs the kernels in Triton's interpreter, whose own matrix products are not bit-stable across tile
shapes. So bits are compared on small integers, where every order of sums is exact: an indexing,
masking or reduction mistake shows, rounding does not. Rounding is `tests/gpu/test_matmul_gpu.py`.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton.runtime import interpreter

    # The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer takes as
    # loop bounds.
    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor, scope):
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_and_index

from quire.kernels.matmul import MatmulWorkspace, matmul, plan_matmul
from quire.kernels.matmul_configs import SplitPlan, TileConfig, pick_config, split_plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 2048), (1024, 3072), (128, 528)]
CONFIGS = {
    "swap-last": TileConfig(16, 64, 128, 2, 4, swap=True, reduce="last"),
    "swap-loop": TileConfig(16, 64, 128, 2, 4, swap=True),
    "plain-kernel": TileConfig(32, 32, 64, 2, 4, reduce="kernel"),
    "plain-loop": TileConfig(16, 32, 256, 2, 4, group_m=2),
    "swap-park": TileConfig(16, 64, 128, 2, 4, swap=True, reduce="park"),
    "tma-last": TileConfig(16, 64, 128, 2, 4, swap=True, reduce="last", tma=True),
}


def _integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, device=DEVICE).half()


def _run(
    x: Tensor, w: Tensor, bias: Tensor | None, splits: int, config: TileConfig, space: bool = True
) -> Tensor:
    out = torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device=DEVICE)
    workspace = MatmulWorkspace(DEVICE, 1 << 16, 1 << 8) if space else None
    for call in plan_matmul(x, w, bias, out, SplitPlan.of(x.shape[1], splits), config, workspace):
        call.run()
    assert workspace is None or not workspace.counters.any()
    return out


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("m,n,k,splits", [(1, 64, 512, 2), (21, 100, 528, 3), (40, 32, 256, 1)])
def test_every_config_sums_exactly(name: str, m: int, n: int, k: int, splits: int) -> None:
    torch.manual_seed(m)
    x, w, bias = _integers(m, k), _integers(n, k), _integers(n)
    expected = (x.double() @ w.double().T + bias.double()).half()
    assert torch.equal(_run(x, w, bias, splits, CONFIGS[name]), expected)


@pytest.mark.parametrize("name", ["swap-last", "plain-kernel"])
def test_without_workspace_the_sum_is_the_same(name: str) -> None:
    x, w = _integers(5, 512), _integers(64, 512)
    with_space = _run(x, w, None, 2, CONFIGS[name])
    assert torch.equal(with_space, _run(x, w, None, 2, CONFIGS[name], space=False))


def test_workspace_is_reusable_with_dirty_partials() -> None:
    workspace = MatmulWorkspace(DEVICE, 1 << 16, 1 << 8)
    x, w = _integers(20, 1024), _integers(96, 1024)
    config, plan = CONFIGS["swap-last"], SplitPlan.of(1024, 4)
    for rows in (x, x[:3], x.flip(0)):
        workspace.partials.fill_(float("nan"))
        out = torch.empty(len(rows), 96, dtype=x.dtype, device=DEVICE)
        for call in plan_matmul(rows, w, None, out, plan, config, workspace):
            call.run()
        assert torch.equal(out, (rows.double() @ w.double().T).half())
        assert not workspace.counters.any()


def test_parked_rows_go_in_pieces_that_fit() -> None:
    x, w, bias = _integers(70, 768), _integers(40, 768), _integers(40)
    out = torch.full((70, 40), float("nan"), dtype=x.dtype, device=DEVICE)
    workspace = MatmulWorkspace(DEVICE, max_partials=2 * 40 * 33)  # two planes of 32 rows and a bit
    plan = SplitPlan.of(768, 3)
    calls = plan_matmul(x, w, bias, out, plan, CONFIGS["swap-park"], workspace)
    assert len(calls) == 3
    for call in calls:
        call.run()
    assert torch.equal(out, (x.double() @ w.double().T + bias.double()).half())


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_matches_double_precision(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 272, device=DEVICE).to(dtype)
    w = torch.randn(70, 272, device=DEVICE).to(dtype)
    expected = x.double() @ w.double().T
    y = matmul(x, w, workspace=MatmulWorkspace(DEVICE, 1 << 16, 1 << 8))
    assert (y - expected).norm() / expected.norm() < tolerance


def test_a_row_keeps_its_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(40, 128, device=DEVICE), torch.randn(48, 128, device=DEVICE)
    whole = matmul(x, w)
    for start, stop in ((0, 1), (7, 10), (39, 40), (3, 36)):
        assert torch.equal(matmul(x[start:stop], w), whole[start:stop])


def test_strided_views_and_empty_batch() -> None:
    x, w = _integers(6, 512)[::2, :256], _integers(40, 256)
    out = torch.full((3, 64), float("nan"), dtype=x.dtype, device=DEVICE)[:, :40]
    assert matmul(x, w, out=out) is out
    assert torch.equal(out, (x.double() @ w.double().T).half())
    assert matmul(x[:0], w).shape == (0, 40)


@pytest.mark.parametrize("n,k", SHAPES)
def test_splits_tile_the_sum(n: int, k: int) -> None:
    plan = split_plan(n, k)
    assert (plan.num_splits - 1) * plan.split_len < k <= plan.num_splits * plan.split_len
    assert plan.num_splits == 1 or plan.split_len % 256 == 0


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 200, 257, 8192])
def test_configs_use_the_wide_matrix_unit_and_fit(m: int, n: int, k: int) -> None:
    config = pick_config(m, n, k)
    # Mixing matrix-unit generations in one model is how bits would come to depend on the batch.
    assert (config.block_n if config.swap else config.block_m) % 64 == 0
    assert config.num_warps % 4 == 0
    stage = (config.block_m + config.block_n) * config.block_k * 2
    assert stage * config.num_stages <= 227 * 1024

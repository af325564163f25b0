"""The promise of the matmul on a real GPU: a row's bits depend on that row and the weight alone.

Inputs have a wide spread of magnitudes, so that two orders of summation do round differently;
integers or a narrow normal would let a broken promise pass. Reference is fp64 on the same device.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.kernels.matmul import MatmulWorkspace, matmul, plan_matmul
from quire.kernels.matmul_configs import SplitPlan, TileConfig, split_plan

BATCHES = (1, 2, 3, 5, 16, 17, 33, 64, 100, 128, 129, 257, 1024)
# Narrow (split), wide (whole), ragged in n, ragged in k.
SHAPES = ((1024, 2048), (4096, 4096), (20480, 1024), (1000, 1536), (512, 2064))


def _spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).to(dtype)


@pytest.fixture(scope="module")
def workspace() -> MatmulWorkspace:
    return MatmulWorkspace("cuda")


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matches_double_precision(
    n: int, k: int, dtype: torch.dtype, workspace: MatmulWorkspace
) -> None:
    torch.manual_seed(n + k)
    x, w, bias = _spread(100, k, dtype=dtype), _spread(n, k, dtype=dtype), _spread(n, dtype=dtype)
    expected = x.double() @ w.double().T + bias.double()
    for m in (1, 40, 100):
        out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
        matmul(x[:m], w, bias, out, workspace=workspace)
        error = (out - expected[:m]).norm() / expected[:m].norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 5e-4), f"{m=} {error=}"


@pytest.mark.parametrize("n,k", SHAPES)
def test_rows_do_not_see_the_batch(n: int, k: int, workspace: MatmulWorkspace) -> None:
    torch.manual_seed(n * k)
    x, w = _spread(max(BATCHES), k), _spread(n, k)
    whole = matmul(x, w, workspace=workspace)
    for m in BATCHES:
        picked = torch.randperm(len(x), device="cuda")[:m]
        assert torch.equal(matmul(x[picked], w, workspace=workspace), whole[picked]), f"{m=}"


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_every_config_gives_the_same_bits(splits: int, workspace: MatmulWorkspace) -> None:
    torch.manual_seed(splits)
    x, w = _spread(130, 4096), _spread(1000, 4096)
    plan = SplitPlan.of(4096, splits)
    results: list[Tensor] = []
    for config in (
        TileConfig(64, 64, 64, 3, 4),
        TileConfig(16, 64, 128, 4, 4, swap=True, reduce="last"),
        TileConfig(16, 64, 128, 4, 4, swap=True, reduce="last", tma=True),
        TileConfig(32, 128, 256, 2, 8, swap=True, reduce="kernel"),
        TileConfig(128, 128, 64, 3, 8),
        TileConfig(128, 256, 64, 3, 8, reduce="park"),
        TileConfig(128, 128, 64, 3, 8, tma=True, group_m=1),
    ):
        out = torch.full((130, 1000), float("nan"), dtype=x.dtype, device="cuda")
        for call in plan_matmul(x, w, None, out, plan, config, workspace):
            call.run()
        results.append(out)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_split_sums_survive_repetition(workspace: MatmulWorkspace) -> None:
    # A missing fence between a partial sum and its reader shows as a rare wrong tile.
    assert split_plan(1024, 4096).num_splits > 1
    x, w = _spread(16, 4096), _spread(1024, 4096)
    first = matmul(x, w, workspace=workspace)
    for _ in range(200):
        workspace.partials.fill_(float("nan"))
        assert torch.equal(matmul(x, w, workspace=workspace), first)
    assert not workspace.counters.any()


@pytest.mark.parametrize("m", [1, 64, 300])
def test_graph_replays_give_the_same_bits(m: int, workspace: MatmulWorkspace) -> None:
    x, w = _spread(m, 2048), _spread(1024, 2048)
    expected = matmul(x, w, workspace=workspace)
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(x, w, out=out, workspace=workspace)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)

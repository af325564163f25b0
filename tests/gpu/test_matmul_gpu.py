"""The promise of the matmul on a real GPU: a row's bits depend on that row and the weight alone.

Inputs have a wide spread of magnitudes, so that two orders of summation do round differently;
integers or a narrow normal would let a broken promise pass. Reference is fp64 on the same device.
The library's part in it is `test_gpu_vendor.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.kernels.matmul import Layouts, PreparedMatmul, interleave, matmul
from quire.kernels.matmul_configs import TileConfig
from quire.kernels.rms_norm import rms_norm
from quire.kernels.silu_mul import silu_mul

BATCHES = (1, 2, 3, 5, 16, 17, 33, 64, 100, 128, 129, 200, 257, 1024)
# Narrow, square, wide, ragged in n, ragged in k.
SHAPES = ((1024, 2048), (4096, 4096), (20480, 1024), (1000, 1536), (512, 2064))
CONFIGS = (
    TileConfig(64, 64, 64, 3, 4),
    TileConfig(16, 64, 128, 8, 4, swap=True),
    TileConfig(16, 64, 128, 4, 4, swap=True, tma=True),
    TileConfig(32, 128, 256, 2, 8, swap=True),
    TileConfig(64, 64, 128, 6, 4, swap=True, tma=True),
    TileConfig(64, 128, 64, 6, 4, tma=True),
    TileConfig(64, 256, 64, 4, 4, tma=True),
    TileConfig(128, 128, 64, 3, 8),
    TileConfig(128, 128, 64, 3, 8, tma=True, group_m=1),
    TileConfig(128, 256, 64, 4, 8, tma=True),
    # Fewer than 64 rows on the row side: the older matrix instruction.
    TileConfig(16, 32, 256, 5, 4, swap=True),
    TileConfig(16, 16, 512, 3, 4, swap=True),
    TileConfig(32, 32, 64, 3, 4),
)


def _spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).to(dtype)


def _hole(m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matches_double_precision(n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n + k)
    x, w, bias = _spread(100, k, dtype=dtype), _spread(n, k, dtype=dtype), _spread(n, dtype=dtype)
    expected = x.double() @ w.double().T + bias.double()
    for m in (1, 40, 100):
        out = matmul(x[:m], w, bias, _hole(m, n, dtype))
        error = (out - expected[:m]).norm() / expected[:m].norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 5e-4), f"{m=} {error=}"


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("use_library", [False, True])
def test_rows_do_not_see_the_batch(n: int, k: int, gated: bool, use_library: bool) -> None:
    torch.manual_seed(n * k)
    x, w = _spread(max(BATCHES), k), _spread(n, k)
    product = PreparedMatmul(w, None, Layouts(use_library), "silu" if gated else None)
    whole = product(x)
    for m in BATCHES:
        picked = torch.randperm(len(x), device="cuda")[:m]
        assert torch.equal(product(x[picked]), whole[picked]), f"{m=}"


@pytest.mark.parametrize("k", [4096, 2064])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_config_gives_the_same_bits(k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(k)
    x, w, bias = (
        _spread(130, k, dtype=dtype),
        _spread(1000, k, dtype=dtype),
        _spread(1000).to(dtype),
    )
    plain = matmul(x, w, bias, _hole(130, 1000, dtype), CONFIGS[0])
    gated = silu_mul(plain, interleaved=True)
    for config in CONFIGS:
        assert torch.equal(matmul(x, w, bias, _hole(130, 1000, dtype), config), plain), config
        out = matmul(x, w, bias, _hole(130, 500, dtype), config, gate="silu")
        assert torch.equal(out, gated), config


def test_interleaved_weights_change_no_bit() -> None:
    torch.manual_seed(0)
    x, w, bias = _spread(70, 1024), _spread(2048, 1024), _spread(2048)
    out = matmul(x, interleave(w), interleave(bias), gate="silu")
    assert torch.equal(out, silu_mul(matmul(x, w, bias)))


@pytest.mark.parametrize("m", [1, 16, 40, 300])
def test_kernels_started_early_wait_for_each_other(m: int) -> None:
    """Red when a kernel reads, or overwrites, what the one before has not finished with: rare, so
    a long chain through two buffers, many times over."""
    torch.manual_seed(m)
    x, ones = _spread(m, 1024), torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    layers = [(_spread(2048, 1024), _spread(1024, 1024)) for _ in range(4)]
    middle, result = _hole(m, 1024), _hole(m, 1024)

    def chain(between: Callable[[], object]) -> Tensor:
        middle.fill_(float("nan"))
        result.copy_(x)
        for up, down in layers:
            normed, _ = rms_norm(result, ones, 1e-6)
            between()
            matmul(normed, up, out=middle, gate="silu")
            between()
            matmul(middle, down, out=result)
            between()
        return result.clone()

    expected = chain(torch.cuda.synchronize)
    assert expected.isfinite().all() and expected.any()
    for _ in range(100):
        assert torch.equal(chain(lambda: None), expected)


@pytest.mark.parametrize("m", [1, 64, 300])
@pytest.mark.parametrize("gated", [False, True])
def test_graph_replays_give_the_same_bits(m: int, gated: bool) -> None:
    torch.manual_seed(m)
    x, w = _spread(m, 2048), _spread(2048, 2048)
    first, second = (
        PreparedMatmul(w, None, Layouts(), gate=g) for g in ("silu" if gated else None, None)
    )
    width = 1024 if gated else 2048
    third = PreparedMatmul(_spread(2048, width), None, Layouts())
    expected = second(third(first(x)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = second(third(first(x)))
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)

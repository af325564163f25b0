"""The streaming matmul gives the bits of the plain one, whatever its portions, and writes no more.

Inputs have a wide spread of magnitudes, so that another order of sums rounds otherwise.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.hopper import has_hopper_kernels

if not torch.cuda.is_available() or not has_hopper_kernels(torch.device("cuda")):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from quire.kernels.chip import chip_of
from quire.kernels.matmul import Layouts, PreparedMatmul, matmul
from quire.kernels.rms_norm import rms_norm
from quire.kernels.stream_configs import MOST_ROWS, StreamConfig, pick_stream
from quire.kernels.stream_matmul import StreamMatmul

SHAPES = (
    (4096, 4096), (6144, 4096), (5120, 5120), (7168, 5120), (1024, 3072), (28672, 1024), (896, 896),
)  # fmt: skip


def _spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).to(dtype)


def _framed(m: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A place for an output inside a larger block of NaN, and the block."""
    block = torch.full((m + 2, n + 16), float("nan"), dtype=dtype, device="cuda")
    return block[:m, :n], block


def _stream(
    product: StreamMatmul, x: Tensor, config: StreamConfig | None = None
) -> tuple[Tensor, Tensor]:
    config = config or product.pick(len(x))
    assert config is not None
    n = product.w.shape[0] // (2 if product.gate else 1)
    out, block = _framed(len(x), n, x.dtype)
    product(x, out, config)
    return out, block


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "gate,biased", [(None, False), ("silu", False), (None, True), ("gelu", True)]
)
def test_bits_are_those_of_the_plain_product(
    n: int, k: int, dtype: torch.dtype, gate: str | None, biased: bool
) -> None:
    torch.manual_seed(n + k)
    x, w = _spread(32, k, dtype=dtype), _spread(n, k, dtype=dtype)
    bias = _spread(n, dtype=dtype) if biased else None
    product = StreamMatmul(w, bias, gate)
    want = matmul(x, w, bias, gate=gate)
    for m in (1, 4, 5, 8, 9, 16, 17, 31, 32):
        out, block = _stream(product, x[:m])
        assert torch.equal(out, want[:m]), f"{m=} {product.pick(m)}"
        block[:m, : want.shape[1]] = float("nan")
        assert block.isnan().all(), f"{m=} wrote outside"


@pytest.mark.parametrize("n,k", [(28672, 1024), (32768, 4096)])
@pytest.mark.parametrize("gate,biased", [("silu", False), ("gelu", True), (None, True)])
def test_wide_weights_keep_the_bits_of_larger_batches(
    n: int, k: int, gate: str | None, biased: bool
) -> None:
    torch.manual_seed(n + k)
    x, w = _spread(MOST_ROWS, k), _spread(n, k)
    bias = _spread(n) if biased else None
    product = StreamMatmul(w, bias, gate)
    want = matmul(x, w, bias, gate=gate)
    sizes = [m for m in (33, 48, 64, 96, 111, 128, 250, 256) if product.pick(m) is not None]
    assert sizes == ([33, 48, 64, 96, 111, 128, 250, 256] if gate else [33, 48, 64])
    for m in sizes:
        out, block = _stream(product, x[:m])
        assert torch.equal(out, want[:m]), f"{m=} {product.pick(m)}"
        block[:m, : want.shape[1]] = float("nan")
        assert block.isnan().all(), f"{m=} wrote outside"


@pytest.mark.parametrize(
    "tile,rows", [*((64, rows) for rows in range(8, 65, 8)), (128, 128), (256, 256), (256, 160)]
)
@pytest.mark.parametrize("block_k,num_stages", [(64, 3), (128, 2), (128, 3)])
def test_portions_do_not_change_a_bit(tile: int, rows: int, block_k: int, num_stages: int) -> None:
    torch.manual_seed(rows)
    x, w = _spread(20, 1024, dtype=torch.float16), _spread(rows * 10, 1024, dtype=torch.float16)
    want = matmul(x, w)
    product = StreamMatmul(w, None, None)
    for ahead in (0, 1, num_stages):
        out, _ = _stream(product, x, StreamConfig(rows, 32, block_k, num_stages, ahead, tile))
        assert torch.equal(out, want), f"{ahead=}"


@pytest.mark.parametrize("m,block_m", [(9, 8), (48, 32), (200, 64), (256, 128)])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_inputs_in_several_tiles(m: int, block_m: int, gate: str | None) -> None:
    x, w = _spread(m, 512), _spread(6144, 512)
    product = StreamMatmul(w, None, gate)
    out, block = _stream(product, x, StreamConfig(64, block_m, 64, 4, 2))
    assert torch.equal(out, matmul(x, w, gate=gate))
    block[:m, : out.shape[1]] = float("nan")
    assert block.isnan().all()


@pytest.mark.parametrize("k", [128, 256, 384])
def test_short_sums(k: int) -> None:
    """Fewer tiles of k than stages: red when a copy is asked for that nobody waits for."""
    x, w = _spread(3, k), _spread(4096, k)
    bias = torch.randn(4096, device="cuda")  # not the weight's dtype
    out, _ = _stream(StreamMatmul(w, bias, "relu2"), x)
    assert torch.equal(out, matmul(x, w, bias, gate="relu2"))


def test_prepared_products_stream() -> None:
    """Red when the kernel is there and nobody uses it."""
    w = _spread(4096, 1024)
    product = PreparedMatmul(w, None, Layouts())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        product(_spread(4, 1024))
        torch.cuda.synchronize()
    assert any("stream_matmul" in event.name for event in seen.events())


def test_a_program_leaves_the_rows_of_others_alone() -> None:
    """Fewer rows a program than its tile has: those below are not its own."""
    x, w = _spread(3, 512), _spread(80, 512)
    config = pick_stream(3, 80, 512, gated=False, chip=chip_of(torch.device("cuda")))
    assert config is not None and config.rows == 40
    want = matmul(x, w)
    alone = StreamMatmul(w[:40], None, None)  # one program of 40 rows
    out, block = _framed(3, 80, x.dtype)
    alone(x, out, config)
    assert torch.equal(out[:, :40], want[:, :40]) and out[:, 40:].isnan().all()
    assert block[3:].isnan().all()


def test_inputs_are_read_after_the_kernel_that_writes_them() -> None:
    """In a graph, where every kernel starts as early as it may, with other inputs at each replay:
    red when a product reads its input, or a norm a product's output, of the replay before."""
    torch.manual_seed(0)
    weights = [_spread(2048, 2048) for _ in range(4)]
    products = [StreamMatmul(w, None, None) for w in weights]
    norm = torch.ones(2048, device="cuda", dtype=torch.bfloat16)

    def chain(x: Tensor) -> Tensor:
        for product in products:
            out = torch.empty_like(x)
            config = product.pick(len(x))
            assert config is not None
            product(x, out, config)
            x, _ = rms_norm(out, norm, 1e-5)
        return x

    for m in (1, 8, 32):
        x = _spread(m, 2048)
        chain(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(x)
        for _ in range(20):
            want = x.copy_(_spread(m, 2048))
            for w in weights:
                want, _ = rms_norm(matmul(want, w), norm, 1e-5)
            torch.cuda.synchronize()
            graph.replay()
            assert torch.equal(got, want), f"{m=}"

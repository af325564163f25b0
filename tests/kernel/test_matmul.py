"""The batch-invariant matmul without a GPU: indexing, masks, gates and the choice of tiles.

Runs the kernels in Triton's interpreter, whose own matrix products are not bit-stable across tile
shapes. So bits are compared on small integers, where every order of sums is exact: an indexing or
masking mistake shows, rounding does not. Rounding is `tests/gpu/test_matmul_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.chip import H200
from quire.kernels.matmul import Layouts, PreparedMatmul, interleave, matmul, plan_matmul
from quire.kernels.matmul_configs import TileConfig, fits_one_round, pick_config
from quire.kernels.silu_mul import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = {
    "swap": TileConfig(16, 64, 128, 2, 4, swap=True),
    "swap-tma": TileConfig(16, 64, 128, 2, 4, swap=True, tma=True),
    "swap-narrow": TileConfig(16, 32, 256, 2, 4, swap=True),
    "plain": TileConfig(32, 32, 64, 2, 4),
    "plain-tma": TileConfig(32, 32, 64, 2, 4, tma=True),
    "groups-of-two": TileConfig(16, 32, 64, 2, 4, group_m=2),
}
# One row, full tiles, ragged in all three, several row tiles of which the last group is short.
SIZES = [(1, 64, 512), (32, 64, 256), (21, 100, 528), (53, 70, 272)]
WEIGHT_ROWS = (1, 9, 1000, 1024, 4096, 6144, 28672, 151936)


def _integers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, device=DEVICE).half()


def _walled(values: Tensor) -> Tensor:
    """The same numbers as a view into a larger block of NaN, rows still 16-byte aligned."""
    rows, width = values.shape
    block = torch.full((rows + 8, width + 16), float("nan"), dtype=values.dtype, device=DEVICE)
    view = block[:rows, :width]
    view.copy_(values)
    return view


def _exact(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    total = x.double() @ w.double().T
    return (total if bias is None else total + bias.double()).to(x.dtype)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("m,n,k", SIZES)
def test_every_config_sums_exactly(name: str, m: int, n: int, k: int) -> None:
    """Red when a tile reads or writes outside its rows: everything around them is NaN."""
    torch.manual_seed(m)
    x, w, bias = _integers(m, k), _integers(n, k), _integers(n)
    block = torch.full((m + 3, n + 5), float("nan"), dtype=x.dtype, device=DEVICE)
    out = block[:m, :n]
    assert matmul(_walled(x), _walled(w), bias, out, CONFIGS[name]) is out
    assert torch.equal(out, _exact(x, w, bias))
    assert block[m:].isnan().all() and block[:, n:].isnan().all()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("m,n,k,has_bias", [(1, 64, 512, False), (37, 70, 272, True)])
def test_gate_on_the_way_out_is_the_gate_after(
    name: str, m: int, n: int, k: int, has_bias: bool
) -> None:
    """Red when a gate meets another column's up value, half a tile is stored elsewhere, or silu is
    not rounded before it is multiplied."""
    torch.manual_seed(n)
    x, w = _integers(m, k), _integers(n, k) / 16
    bias = _integers(n) if has_bias else None
    block = torch.full((m + 3, n // 2 + 5), float("nan"), dtype=x.dtype, device=DEVICE)
    out = block[:m, : n // 2]
    pairs = interleave(w), None if bias is None else interleave(bias)
    matmul(x, *pairs, out, CONFIGS[name], gate="silu")
    want = silu_mul(_exact(x, w, bias))
    torch.testing.assert_close(out, want, rtol=2e-3, atol=1e-6)
    assert (out == want).float().mean() > 0.98  # NumPy's exp may follow the layout, rarely
    assert block[m:].isnan().all() and block[:, n // 2 :].isnan().all()


def test_interleave_pairs_gates_with_ups() -> None:
    assert interleave(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    w = torch.randn(10, 7)
    gate, up = interleave(w).unflatten(0, (5, 2)).unbind(1)
    assert torch.equal(torch.cat((gate, up)), w)
    assert interleave(w).is_contiguous()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_matches_double_precision(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 272, device=DEVICE).to(dtype)
    w = torch.randn(70, 272, device=DEVICE).to(dtype)
    expected = x.double() @ w.double().T
    assert (matmul(x, w) - expected).norm() / expected.norm() < tolerance


def test_a_row_keeps_its_bits_in_any_batch() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(40, 128, device=DEVICE), torch.randn(48, 128, device=DEVICE)
    whole = matmul(x, w)
    for start, stop in ((0, 1), (7, 10), (39, 40), (3, 36)):
        assert torch.equal(matmul(x[start:stop], w), whole[start:stop])


def test_strided_views_and_empty_batch() -> None:
    x, w = _integers(6, 512)[::2, :256], _integers(40, 256)
    assert torch.equal(matmul(x, w), _exact(x, w))
    assert matmul(x[:0], w).shape == (0, 40)
    assert matmul(x[:0], w, gate="silu").shape == (0, 20)


def test_inputs_of_another_dtype_are_refused() -> None:
    """Red when their bits are read as the weight's."""
    product = PreparedMatmul(_integers(32, 128).half(), None, Layouts(use_library=False))
    with pytest.raises(AssertionError, match="bfloat16"):
        product(_integers(2, 128).bfloat16())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 20])
def test_prepared_products_are_plain_ones(n: int, gated: bool) -> None:
    """Red when a remembered layout or descriptor serves another batch or another weight."""
    torch.manual_seed(n)
    n *= 1 + gated
    layouts = Layouts(use_library=False)
    weights = [_integers(n, 256) / 16 for _ in range(2)]
    products = [
        PreparedMatmul(w, _integers(n), layouts, "silu" if gated else None) for w in weights
    ]
    for m in (0, 1, 40, 1):
        x = _integers(m, 256)
        shifted = torch.empty(m * 256 + 1, dtype=x.dtype, device=DEVICE)[1:].view(m, 256).copy_(x)
        for product in products:
            want = matmul(x, product.w, product.bias, gate="silu" if gated else None)
            assert torch.equal(product(x), want)
            assert torch.equal(product(shifted), want)
            assert torch.equal(product(_walled(x)), want)


def test_kinds_tell_apart_whose_pointer_is_misaligned() -> None:
    """Red when a variant that reads an aligned weight 16 bytes at a time is kept for one that is
    not, because some other tensor was misaligned then."""

    def at(shift: int, rows: int, width: int) -> Tensor:
        flat = torch.zeros(rows * width + 8, dtype=torch.float16, device=DEVICE)
        return flat[shift : shift + rows * width].view(rows, width)

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)]
    kinds = {
        plan_matmul(at(i, 4, 64), at(j, 32, 64), None, at(o, 4, 32)).kind for i, j, o in places
    }
    assert len(kinds) == len(places)


class _TrustedLibrary(Layouts):
    def may_ask_library(self, w: Tensor, bias: Tensor | None) -> bool:
        return True


@pytest.mark.filterwarnings("ignore:TF32")  # mkldnn.flags sets that one too
@pytest.mark.parametrize("gated", [False, True])
def test_library_and_kernel_are_interchangeable(gated: bool) -> None:
    """Red when the way through the library pairs gates otherwise or forgets the bias."""
    torch.manual_seed(0)
    x, w, bias = _integers(257, 48), _integers(20, 48) / 16, _integers(20)
    product = PreparedMatmul(
        interleave(w), interleave(bias), _TrustedLibrary(), "silu" if gated else None
    )
    want = _exact(x, w, bias)
    want = F.silu(want[:, :10]) * want[:, 10:] if gated else interleave(want.T).T
    with torch.backends.mkldnn.flags(enabled=False):  # its 16-bit kernels need a newer CPU
        for m in (257, 10):  # the library's, ours
            torch.testing.assert_close(product(x[:m]), want[:m], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("n", WEIGHT_ROWS)
@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64, 65, 128, 129, 200, 257, 2000, 8192])
@pytest.mark.parametrize("k", [896, 4096])
def test_picked_configs_fit_the_chip(m: int, n: int, k: int) -> None:
    config = pick_config(m, n, k, H200)
    assert k % config.block_k == 0, "the slower loop, which masks"
    # Fewer rows on that side would fall back to the older, slower matrix instruction.
    assert (config.block_n if config.swap else config.block_m) % 64 == 0
    assert config.num_warps % 4 == 0
    stage = (config.block_m + config.block_n) * config.block_k * 2
    assert stage * config.num_stages <= 227 * 1024
    assert max(config.block_m, config.block_n, config.block_k) <= 256  # a descriptor's box
    assert config.block_n % 2 == 0  # gates come in pairs
    assert config.block_m <= max(16, 2 * m), "more than half of each tile is padding"


def test_wide_weights_leave_no_short_round() -> None:
    assert pick_config(64, 28672, 4096, H200).block_n == 128
    assert (
        pick_config(64, 34816, 5120, H200).block_n == 64
    )  # of 128 there were 2 rounds and 8 tiles
    assert (
        pick_config(64, 34816, 2880, H200).block_k == 64
    )  # which the narrow tile's does not divide


def test_one_round_is_a_tile_for_each_multiprocessor() -> None:
    assert fits_one_round(64, 132 * 64, 132) and not fits_one_round(64, 132 * 64 + 1, 132)
    assert fits_one_round(128, 66 * 64, 132) and not fits_one_round(129, 66 * 64, 132)

"""The vendor's library without split-k gives the bits of our kernel, at any number of rows.

Nobody promises it, so it is swept: the weights of three models at many batch sizes, each compared
with the rows that our kernel gives in one large batch. Inputs have a wide spread of magnitudes, so
that another order of summation does round differently.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.matmul_candidates import SHAPES
from quire.kernels import vendor_matmul as library
from quire.kernels.chip import H200
from quire.kernels.matmul import Layouts, PreparedMatmul, matmul
from quire.kernels.matmul_configs import TileConfig
from quire.kernels.vendor_matmul import agrees, forbid_split_k, vendor_matmul

OURS = TileConfig(128, 256, 64, 4, 8, tma=True)
NUM_BATCHES = 25
MAX_ROWS = 8192
DTYPES = [torch.bfloat16, torch.float16]
# Routers, the head of a classifier: fewer columns than the library's tiles.
NARROW = [(1, 4096), (8, 4096), (9, 2048), (64, 2048), (128, 2048), (257, 7168)]
# Widths and depths of other models, down to the narrowest that may be asked for.
OTHERS = [(512, 1024), (576, 4096), (640, 1152), (1152, 576), (2048, 1408), (2816, 2048)]
SPLITTABLE = [(512, 16384), (1024, 14336), (1024, 3072)]


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """They are the process's: each test begins as a model does, and leaves what it found."""
    settings = torch.backends.cuda.matmul
    before = torch.backends.cuda.preferred_blas_library()
    forbid_split_k()
    yield
    torch.backends.cuda.preferred_blas_library(before)
    settings.allow_bf16_reduced_precision_reduction = True
    settings.allow_fp16_reduced_precision_reduction = True


def _spread(*shape: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, dtype=dtype, device="cuda")
    values *= torch.randn(shape, dtype=dtype, device="cuda").exp_()
    return values.mul_(shape[-1] ** -0.5)


def _ours(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return matmul(x, w, bias, config=OURS)


def _library(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), len(w)), float("nan"), dtype=x.dtype, device="cuda")
    return vendor_matmul(x, w, bias, out)


def _batches(n: int, k: int) -> list[int]:
    """Batch sizes, mostly odd, as many between 65 and 130 as between 4,096 and 8,192; for deep
    weights, which the library gets from 17 rows on, some below."""
    draw = random.Random(n * k)
    some = [65, 96, 128, 129, 256, MAX_ROWS]
    while len(some) < NUM_BATCHES:
        some.append(round(math.exp(draw.uniform(math.log(65), math.log(MAX_ROWS)))))
    if library.is_faster(17, n, k, False, H200.units):
        some += [17, 24, 32, 33, 48, 64, *(draw.randrange(17, 65) for _ in range(6))]
    return some


def _disagreements(w: Tensor, bias: Tensor | None) -> dict[int, int]:
    """How many outputs of the library are not ours, by batch size."""
    n, k = w.shape
    x = _spread(MAX_ROWS, k, dtype=w.dtype)
    wanted = _ours(x, w, bias)
    draw = random.Random(n)
    found: dict[int, int] = {}
    for m in _batches(n, k):
        # Anywhere in the large batch: a row's bits do not follow its place either.
        start = draw.randrange(MAX_ROWS - m + 1)
        got = _library(x[start : start + m], w, bias)
        if not torch.equal(got, wanted[start : start + m]):
            found[m] = int((got != wanted[start : start + m]).sum())
    return found


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_models_products_have_our_bits(model: str, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    for n, k in SHAPES[model]:
        w = _spread(n, k, dtype=dtype)
        bias = _spread(n, dtype=dtype) if has_bias else None
        assert _disagreements(w, bias) == {}, f"{n} x {k}: outputs that differ, by rows"
        assert agrees(w, bias, lambda x, w=w, bias=bias: _ours(x, w, bias)), f"{n} x {k}"


@pytest.mark.parametrize("n,k", NARROW + OTHERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_the_check_says_yes_all_batches_agree(n: int, k: int, dtype: torch.dtype) -> None:
    """Red when the few batch sizes of the check miss one where a narrow product is split."""
    torch.manual_seed(0)
    w, bias = _spread(n, k, dtype=dtype), _spread(n, dtype=dtype)
    for some in (None, bias):
        if agrees(w, some, lambda x, some=some: _ours(x, w, some)):
            assert _disagreements(w, some) == {}, "outputs that differ, by rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_their_bits_wherever_they_lie(dtype: torch.dtype) -> None:
    """Red when misaligned or strided rows reach the library, where another kernel may take them."""
    torch.manual_seed(0)
    w, bias = _spread(4096, 2048, dtype=dtype), _spread(4096, dtype=dtype)
    product = PreparedMatmul(w, bias, Layouts())
    for m in (65, 200, 1001):
        x = _spread(m, 2048, dtype=dtype)
        wanted = _ours(x, w, bias)
        shifted = torch.empty(m * 2048 + 1, dtype=dtype, device="cuda")[1:].view(m, 2048)
        assert torch.equal(product(shifted.copy_(x)), wanted), f"{m=}, misaligned"
        for padding in (1, 8):
            view = torch.empty(m, 2048 + padding, dtype=dtype, device="cuda")[:, :2048]
            assert torch.equal(product(view.copy_(x)), wanted), f"{m=}, {padding=}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_notices_another_order_of_sums(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = _spread(1024, 2048, dtype=dtype)

    def in_two_ranges(x: Tensor) -> Tensor:
        halves = zip(x.double().chunk(2, 1), w.double().chunk(2, 1), strict=True)
        low, high = ((a @ b.T).float() for a, b in halves)
        return (low + high).to(dtype)

    assert agrees(w, None, lambda x: _ours(x, w, None))
    assert not agrees(w, None, in_two_ranges)


def test_the_check_notices_split_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the check would let the library's default settings pass."""
    torch.manual_seed(0)
    weights = [_spread(n, k, dtype=torch.bfloat16) for n, k in SPLITTABLE]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    splits = [w for w in weights if _disagreements(w, None)]
    if not splits:
        pytest.skip("this library splits none of these products")
    monkeypatch.setattr(library, "forbid_split_k", lambda: None)
    said = [agrees(w, None, lambda x, w=w: _ours(x, w, None)) for w in splits]
    assert not all(said), f"split-k changes bits of {[tuple(w.shape) for w in splits]}"

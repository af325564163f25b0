"""When the vendor's library may stand in for our kernel: the check itself, with a library at hand.

On a CPU the library is another one, which is as good to tell agreement from disagreement. Whether
the GPU's does agree is `tests/gpu/test_gpu_vendor.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.kernels import vendor_matmul as library
from quire.kernels.vendor_matmul import agrees, is_faster, vendor_matmul

pytestmark = pytest.mark.filterwarnings("ignore:TF32")  # mkldnn.flags sets that one too
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the process's, not the test's, and a build without CUDA has none."""
    monkeypatch.setattr(library, "forbid_split_k", lambda: None)


@pytest.fixture(autouse=True)
def _plain_cpu_products() -> Iterator[None]:
    """Some virtual machines announce 16-bit matrix instructions that they then refuse."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def _product(w: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return vendor_matmul(x, w, bias, torch.empty(len(x), len(w), dtype=w.dtype, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_different_bit_is_disagreement(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    w = torch.randn(512, 64, device=DEVICE).to(dtype)
    bias = torch.randn(512, device=DEVICE).to(dtype) if has_bias else None
    batches: list[int] = []

    def same(x: Tensor) -> Tensor:
        batches.append(len(x))
        return _product(w, bias, x)

    def one_bit_off(x: Tensor) -> Tensor:
        out = _product(w, bias, x)
        if len(x) == max(batches):  # at one batch size only
            out.view(torch.int16)[-1, -1] ^= 1
        return out

    assert agrees(w, bias, same)
    assert len(set(batches)) > 1
    assert not agrees(w, bias, one_bit_off)


@pytest.mark.parametrize(
    "w",
    [
        torch.ones(512, 64),
        torch.ones(448, 64, dtype=torch.float16),
        torch.ones(520, 64, dtype=torch.float16),
        torch.ones(512, 80, dtype=torch.float16),
    ],
    ids=["fp32", "narrow", "ragged rows", "ragged columns"],
)
def test_some_weights_are_never_the_librarys(w: Tensor) -> None:
    w = w.to(DEVICE)
    assert not agrees(w, None, lambda x: _product(w, None, x))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1, 1024, 4096, 6144, 28672, 151936])
def test_few_rows_are_ours_and_many_the_librarys(n: int, gated: bool) -> None:
    assert not any(is_faster(m, n, 4096, gated, units=132) for m in range(65))
    assert all(is_faster(m, n, 4096, gated, units=132) for m in (1000, 2048, 8192))


def test_between_few_and_many_the_shape_decides() -> None:
    assert is_faster(24, 4096, 14336, gated=False, units=132) and not is_faster(
        16, 4096, 14336, gated=False, units=132
    )
    assert not is_faster(24, 1024, 3072, gated=False, units=132)  # ten times slower there
    assert is_faster(80, 4096, 4096, gated=False, units=132) and not is_faster(
        80, 4096, 1024, gated=False, units=132
    )


def test_a_gate_is_fused_where_tiles_fill_the_chip() -> None:
    assert not is_faster(256, 28672, 4096, gated=True, units=132)
    assert is_faster(256, 34816, 5120, gated=True, units=132)  # a third round for a few tiles
    assert is_faster(256, 28672, 4096, gated=False, units=132)
    assert not is_faster(208, 6144, 1024, gated=True, units=132)  # a round of small tiles

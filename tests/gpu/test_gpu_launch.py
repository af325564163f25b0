"""Launcher: a variant kept from one launch must not serve one that Triton would compile anew."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.kernels.matmul import Layouts, PreparedMatmul, matmul
from quire.kernels.rms_norm import rms_norm
from quire.kernels.silu_mul import silu_mul

DEVICE = "cuda"


def rows(count: int, width: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that begin `shift` elements after an aligned address."""
    flat = torch.randn(count * width + 16, device=DEVICE, dtype=dtype)
    return flat[shift : shift + count * width].view(count, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_alignment_and_dtype_are_told_apart(dtype: torch.dtype) -> None:
    """Red when a kernel compiled for aligned rows is handed others: a fault, or wrong bytes."""
    weight = torch.randn(256, device=DEVICE, dtype=dtype)
    for shift in (0, 0, 1, 3, 8, 1, 0):
        x = rows(5, 256, shift, dtype)
        got, _ = rms_norm(x, weight, 1e-6)
        want = torch.nn.functional.rms_norm(x.float(), (256,), weight.float(), 1e-6)
        torch.testing.assert_close(got.float(), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("width", [48, 50, 1, 1024, 1000])
def test_widths_are_told_apart(width: int) -> None:
    """Red when a width divisible by 16 lends its variant to one that is not."""
    for count in (1, 16, 3):
        x = torch.randn(count, 2 * width, device=DEVICE, dtype=torch.bfloat16)
        want = torch.nn.functional.silu(x[:, :width]) * x[:, width:]
        torch.testing.assert_close(silu_mul(x), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("n", [256, 250, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("use_library", [False, True])
def test_prepared_products_have_the_bits_of_plain_ones(
    n: int, has_bias: bool, gated: bool, use_library: bool
) -> None:
    """Red when a remembered layout or descriptor changes a result, or the library's way does."""
    w = torch.randn(n, 512, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(n, device=DEVICE, dtype=torch.bfloat16) if has_bias else None
    product = PreparedMatmul(w, bias, Layouts(use_library), "silu" if gated else None)
    for m in (1, 7, 64, 300, 1, 700, 300):
        x = torch.randn(m, 512, device=DEVICE, dtype=torch.bfloat16)
        want = matmul(x, w, bias, gate="silu" if gated else None)
        assert torch.equal(product(x), want)
        assert torch.equal(product(x), want)  # now from memory
        assert torch.equal(product(rows(m, 512, 1, torch.bfloat16).copy_(x)), want)  # misaligned

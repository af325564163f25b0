"""Launcher: a variant kept from one launch must not serve one that Triton would compile anew."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.kernels.launch import Launcher
from quire.kernels.matmul import Layouts, PreparedMatmul, matmul
from quire.kernels.rehearsal import current_rehearsal, rehearsal
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


@triton.jit
def _double_kernel(x, out, NUM: tl.constexpr):
    i = tl.arange(0, NUM)
    tl.store(out + i, 2 * tl.load(x + i))


@triton.jit
def _broken_kernel(x, out, NUM: tl.constexpr):
    tl.static_assert(NUM == 0)


def test_a_rehearsal_compiles_and_launches_nothing() -> None:
    """Red when a kernel runs on what others have not written, or is compiled again later."""
    launch, always = Launcher(_double_kernel), Launcher(_double_kernel, skips_rehearsals=False)
    x = torch.arange(64, dtype=torch.float32, device=DEVICE)
    skipped, written = torch.zeros_like(x), torch.zeros_like(x)
    constants = {"NUM": 64, "num_warps": 1}
    with rehearsal():
        for _ in range(2):
            launch((1, 1, 1), (x, skipped), constants, "kind")
            always((1, 1, 1), (x, written), constants, "kind")
    assert not skipped.any() and torch.equal(written, 2 * x)
    assert len(launch._variants) == 1
    launch((1, 1, 1), (x, skipped), constants, "kind")
    assert torch.equal(skipped, 2 * x)


def test_kinds_of_one_kernel_are_loaded_once() -> None:
    """Red when a thread takes the kernel that another has compiled and not yet loaded."""
    x = torch.arange(64, dtype=torch.float32, device=DEVICE)
    for num in (16, 32, 64):
        launch, out = Launcher(_double_kernel), torch.zeros_like(x)
        with rehearsal():
            for kind in range(24):
                launch((1, 1, 1), (x, out), {"NUM": num, "num_warps": 2}, kind)
        for kind in range(24):
            launch((1, 1, 1), (x, out.zero_()), {"NUM": num, "num_warps": 2}, kind)
            assert torch.equal(out[:num], 2 * x[:num])


def test_a_rehearsal_says_what_does_not_compile() -> None:
    launch, x = Launcher(_broken_kernel), torch.zeros(64, device=DEVICE)
    with pytest.raises(triton.CompilationError), rehearsal():
        launch((1, 1, 1), (x, x), {"NUM": 64, "num_warps": 1}, "kind")
    assert current_rehearsal() is None

"""rms_norm against the formula and rounding of Hugging Face's LlamaRMSNorm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.rms_norm import rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bf16 where the GPU rounds.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2 if DEVICE == "cuda" else 4e-2,
    torch.float16: 2e-3,
}


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


@pytest.mark.parametrize("tokens, width", [(0, 64), (1, 64), (3, 80), (5, 1024), (2, 5120)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_matches_llama(tokens: int, width: int, dtype: torch.dtype, has_residual: bool) -> None:
    x, residual = (torch.randn(tokens, width, device=DEVICE).to(dtype) for _ in range(2))
    weight = torch.randn(width, device=DEVICE).to(dtype)
    kept = (x.clone(), residual.clone())
    normed, summed = rms_norm(x, weight, 1e-5, residual if has_residual else None)
    want_sum = x + residual if has_residual else x
    if DEVICE == "cuda" or dtype != torch.bfloat16 or not has_residual:
        assert torch.equal(summed, want_sum)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])
    want = llama_rms_norm(summed, weight, 1e-5)
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(normed, want, rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_weight_in_fp32_rounds_once(dtype: torch.dtype, has_residual: bool) -> None:
    """Gemma's module: red when the normed row is rounded before the product."""
    x, residual = (torch.randn(7, 320, device=DEVICE).to(dtype) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(320, device=DEVICE)
    normed, summed = rms_norm(x, weight, 1e-6, residual if has_residual else None)
    h = summed.float()
    want = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # truncated in the interpreter
        torch.testing.assert_close(normed, want.to(dtype), rtol=1e-2, atol=1e-2)
    else:
        different = (normed != want.to(dtype)).float().mean()
        assert different < 0.01  # the last bit of fp32 decides; rounding twice changes a third


def test_rows_are_independent() -> None:
    x = torch.randn(9, 1000, device=DEVICE)
    weight = torch.randn(1000, device=DEVICE)
    all_rows, _ = rms_norm(x, weight, 1e-5)
    for i in range(9):
        assert torch.equal(rms_norm(x[i : i + 1], weight, 1e-5)[0], all_rows[i : i + 1])


def test_strided_rows() -> None:
    wide = torch.randn(4, 200, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    view = wide[:, 30:94]
    assert torch.equal(rms_norm(view, weight, 1e-5)[0], rms_norm(view.clone(), weight, 1e-5)[0])

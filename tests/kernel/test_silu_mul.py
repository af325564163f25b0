"""silu_mul against the unfused modules, for gates before ups and for pairs of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.matmul import interleave
from quire.kernels.silu_mul import silu_mul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bf16 where the GPU rounds.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 1e-2 if DEVICE == "cuda" else 4e-2,
    torch.float16: 2e-3,
}
SIZES = [(0, 8), (1, 8), (3, 1024), (2, 1100), (7, 2049)]


@pytest.mark.parametrize("tokens, width", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_torch(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(tokens, 2 * width, device=DEVICE)).to(dtype)
    want = F.silu(x[:, :width]) * x[:, width:]
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(silu_mul(x), want, rtol=tol, atol=tol)


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_other_activations(activation: str, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(3, 2 * 1100, device=DEVICE)).to(dtype)
    want = ACTIVATIONS[activation](x[:, :1100]) * x[:, 1100:]
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(silu_mul(x, activation), want, rtol=tol, atol=tol)


@pytest.mark.parametrize("tokens, width", [*SIZES, (3, 1), (2, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pairs_have_the_bits_of_halves(tokens: int, width: int, dtype: torch.dtype) -> None:
    """Red when a word's halves are swapped, or an odd width shifts a row by half a word."""
    x = (3 * torch.randn(tokens, 2 * width, device=DEVICE)).to(dtype)
    pairs = interleave(x.T).T.contiguous()
    assert torch.equal(silu_mul(pairs, interleaved=True), silu_mul(x))


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
def test_large_negative_gate_is_zero() -> None:
    x = torch.tensor([[-200.0, 200.0, 1.0, 2.0]], device=DEVICE)
    torch.testing.assert_close(silu_mul(x), torch.tensor([[0.0, 400.0]], device=DEVICE))
    pairs = torch.tensor([[-200.0, 1.0, 200.0, 2.0]], dtype=torch.float16, device=DEVICE)
    want = torch.tensor([[0.0, 400.0]], dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(silu_mul(pairs, interleaved=True), want)

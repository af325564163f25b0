"""gpt-oss's gate: the kernel and the CPU's way against transformers' module, and rows' bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from quire.kernels.clamped_swiglu import clamped_swiglu as kernel
from quire.ops.torch_gate import clamped_swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bf16 where the GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ALPHA, LIMIT = 1.702, 7.0


def theirs(gate_up: Tensor) -> Tensor:
    """In f32, gate and up interleaved as they store them."""
    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=1, intermediate_size=1))
    gate, up = gate_up.float().chunk(2, -1)
    return experts._apply_gate(torch.stack((gate, up), -1).flatten(-2))


@pytest.mark.parametrize("rows, width", [(0, 8), (1, 8), (3, 1024), (2, 1100), (40, 2049)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_transformers(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x = (6 * torch.randn(rows, 2 * width, device=DEVICE)).to(dtype)  # often past the limit
    want, tol = theirs(x).to(dtype), TOLERANCE[dtype]
    torch.testing.assert_close(kernel(x, ALPHA, LIMIT), want, rtol=tol, atol=tol)
    got = clamped_swiglu(x, alpha=ALPHA, limit=LIMIT)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
def test_far_beyond_the_limits() -> None:
    """Gates are clamped from above alone: a large negative one gives nothing, not a number."""
    x = torch.tensor([[-1e4, 1e4, 1e4, 5.0, 1e4, -1e4]], device=DEVICE)
    want = torch.tensor([[0.0, 7.0 * 8.0, 7.0 * -6.0]], device=DEVICE)
    torch.testing.assert_close(kernel(x, ALPHA, LIMIT), want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(clamped_swiglu(x, alpha=ALPHA, limit=LIMIT), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [37, 2880, 40_000])
def test_rows_keep_their_bits(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (4 * torch.randn(31, 2 * width, device=DEVICE)).to(dtype)
    whole = clamped_swiglu(x, alpha=ALPHA, limit=LIMIT)
    for rows in (slice(0, 1), slice(4, 7), slice(30, 31), slice(2, 29)):
        assert torch.equal(clamped_swiglu(x[rows], alpha=ALPHA, limit=LIMIT), whole[rows])

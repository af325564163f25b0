"""rope_kv_write against Hugging Face's arithmetic, and every slot it must or must not touch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.rope_kv_write import HeadNorm, Rope, rope_kv_write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter truncates to bf16 where the GPU rounds.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2 if DEVICE == "cuda" else 8e-2,
    torch.float16: 4e-3,
}


def hf_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def hf_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [tokens, heads, dim]; cos and sin [tokens, rot_dim / 2]."""
    half = cos.shape[-1]
    cos = torch.cat([cos, cos], -1).to(x.dtype)[:, None]
    sin = torch.cat([sin, sin], -1).to(x.dtype)[:, None]
    rot, rest = x[..., : 2 * half], x[..., 2 * half :]
    turned = torch.cat([-rot[..., half:], rot[..., :half]], -1)
    return torch.cat([rot * cos + turned * sin, rest], -1)


@pytest.mark.parametrize(
    "heads, kv_heads, dim, rot_dim, has_norm",
    [
        (4, 2, 32, 32, False),
        (12, 12, 64, 0, False),
        (7, 1, 80, 20, False),
        (3, 1, 96, 48, True),
        (16, 8, 128, 128, True),
    ],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_matches_hugging_face(
    heads: int, kv_heads: int, dim: int, rot_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    tokens, page_size, num_pages = 5, 16, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    positions = torch.tensor([0, 1, 15, 16, 99], device=DEVICE)
    slots = torch.tensor([16, 31, 32, 63, 5], device=DEVICE)
    keys, values = torch.full((2, num_pages, kv_heads, page_size, dim), 7.0, device=DEVICE).to(
        dtype
    )
    rope = norm = None
    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if has_norm:
        norm = HeadNorm(*torch.randn(2, dim, device=DEVICE).to(dtype), 1e-6)
        q, k = hf_norm(q, norm.q_weight, 1e-6), hf_norm(k, norm.k_weight, 1e-6)
    if rot_dim:
        angles = torch.outer(torch.arange(100.0), 50.0 ** -torch.linspace(0, 1, rot_dim // 2))
        rope = Rope(angles.cos().to(DEVICE), angles.sin().to(DEVICE))
        q, k = (hf_rotate(x, rope.cos[positions], rope.sin[positions]) for x in (q, k))

    got = rope_kv_write(qkv, keys, values, positions, slots, rope, norm)

    tol = TOLERANCE[dtype]
    torch.testing.assert_close(got, q, rtol=tol, atol=tol)
    page, offset = slots // page_size, slots % page_size
    torch.testing.assert_close(keys[page, :, offset], k, rtol=tol, atol=tol)
    assert torch.equal(values[page, :, offset], v)
    keys[page, :, offset] = 7.0
    values[page, :, offset] = 7.0
    assert (keys == 7.0).all() and (values == 7.0).all()


@pytest.mark.parametrize("rot_dim", [32, 64])
def test_norm_weights_in_fp32_round_once(rot_dim: int) -> None:
    """Gemma 3's norms: red when the normed head is rounded before the product."""
    dtype, dim = torch.float16, 64
    qkv = torch.randn(9, 4 * dim, device=DEVICE).to(dtype)  # two heads of q, one of k, one of v
    weights = 1 + 0.3 * torch.randn(2, dim, device=DEVICE)
    keys, values = torch.zeros(2, 1, 1, 16, dim, dtype=dtype, device=DEVICE)
    slots = torch.arange(9, device=DEVICE)
    still = torch.zeros(16, rot_dim // 2, device=DEVICE)
    rope = Rope(still + 1, still)  # turns nothing
    if DEVICE == "cuda":
        torch.cuda.synchronize()  # tables may be read before the wait for the launch before
    q = rope_kv_write(qkv, keys, values, slots, slots, rope, HeadNorm(*weights, 1e-6))
    h = qkv.view(9, 4, dim).float()
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    want = torch.cat([normed[:, :2] * weights[0], normed[:, 2:3] * weights[1]], 1).to(dtype)
    got = torch.cat([q, keys[0, :, :9].transpose(0, 1)], 1)
    assert (got != want).float().mean() < 0.01  # rounding twice changes a third


def test_no_tokens_and_int32_indices() -> None:
    keys, values = torch.zeros(2, 2, 1, 16, 32, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    empty = rope_kv_write(torch.zeros(0, 96, device=DEVICE), keys, values, none, none, None)
    assert empty.shape == (0, 1, 32)
    slots = torch.tensor([17], dtype=torch.int32, device=DEVICE)
    rope_kv_write(torch.ones(1, 96, device=DEVICE), keys, values, slots, slots, None)
    assert keys.sum() == 32 and (keys[1, 0, 1] == 1).all()

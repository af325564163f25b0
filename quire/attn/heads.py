"""Plain-torch head transform: split, per-head norm, rotary embedding. Shared by the backends
that do not fuse it; the CUDA kernel in `kernels/` computes the same."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform


def split_heads(
    qkv: Tensor, heads: HeadTransform, positions: Tensor, spec: AttnSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, (H + 2 Hkv) * D] -> q [tokens, H, D], k and v [tokens, Hkv, D]."""
    num_heads, num_kv = spec.num_heads, spec.num_kv_heads
    x = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, spec.head_dim)
    v = x[:, num_heads + num_kv :]
    qk = x[:, : num_heads + num_kv]
    if heads.q_norm is not None and heads.k_norm is not None:
        q = F.rms_norm(qk[:, :num_heads].float(), (spec.head_dim,), None, heads.eps)
        k = F.rms_norm(qk[:, num_heads:].float(), (spec.head_dim,), None, heads.eps)
        q = q.to(qkv.dtype) * heads.q_norm
        k = k.to(qkv.dtype) * heads.k_norm
        qk = torch.cat((q, k), dim=1)
    if heads.cos is not None and heads.sin is not None:
        qk = rotate(qk, heads.cos[positions], heads.sin[positions])
    return qk[:, :num_heads], qk[:, num_heads:], v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split (NeoX) rotation of the first 2 * cos.shape[-1] dims of [tokens, heads, dim]."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [tokens, 1, half]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty_like(x)
    out[..., :half] = low * cos - high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out

"""Plain-torch head transform: split, per-head norm, rotary embedding.

Shared by the backends that do not fuse it; `kernels/rope_kv_write.py` computes the same on CUDA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform


class Rotation(NamedTuple):
    """Rotary factors of a step's tokens, both halves: [tokens, 1, dim] f32; None: no rotation."""

    cos: Tensor | None
    sin: Tensor | None  # negative in the first half: the sign of the half that is swapped in


def rotation_at(heads: HeadTransform, positions: Tensor) -> Rotation:
    if heads.cos is None or heads.sin is None:
        return Rotation(None, None)
    cos, sin = heads.cos[positions], heads.sin[positions]  # [tokens, dim / 2]
    return Rotation(torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])


def split_heads(
    qkv: Tensor, heads: HeadTransform, rotation: Rotation, spec: AttnSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens, (H + 2 Hkv) * D] -> q [tokens, H, D], k and v [tokens, Hkv, D]."""
    num_heads, num_kv = spec.num_heads, spec.num_kv_heads
    x = qkv.view(qkv.shape[0], num_heads + 2 * num_kv, spec.head_dim)
    qk, v = x[:, : num_heads + num_kv], x[:, num_heads + num_kv :]
    if heads.q_norm is not None and heads.k_norm is not None:
        q = _normed(qk[:, :num_heads], heads.q_norm, heads.eps)
        k = _normed(qk[:, num_heads:], heads.k_norm, heads.eps)
        qk = torch.cat((q, k), dim=1)
    qk = rotate(qk, rotation)
    return qk[:, :num_heads], qk[:, num_heads:], v


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = F.rms_norm(x.float(), weight.shape, None, eps)
    if weight.dtype == x.dtype:
        return normed.to(x.dtype) * weight
    return (normed * weight).to(x.dtype)  # a weight in fp32: rounded once


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Half-split (NeoX) rotation of the first dims of [tokens, heads, dim]; the rest passes."""
    cos, sin = rotation
    if cos is None or sin is None:
        return x
    dim = cos.shape[-1]
    turned, rest = x[..., :dim].float(), x[..., dim:]
    swapped = torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), -1)
    out = torch.addcmul(turned * cos, swapped, sin).to(x.dtype)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out

"""Every head of a token times that head's own weight, all heads in one launch.

Weights stand on the row side of the matrix units, which see 64 of their rows whatever the number
of tokens, and an output is one chain of fp32 additions over increasing k: as in
`grouped_matmul.py`, a row's bits depend on that row alone while tiles follow the batch. Weights are
read with any strides, so the two products of latent attention are two views of one tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher

BLOCK_OUT, BLOCK_IN = 64, 64
TOKEN_BLOCKS = (16, 64, 128)


@triton.jit(do_not_specialize=["num_tokens"])
def _multiply_heads_kernel(
    x, weight, out, num_tokens, x_token, x_head, w_head, w_out, w_in, out_token, out_head,
    OUT: tl.constexpr, IN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    o = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_token, is_out = t < num_tokens, o < OUT
    x_rows = x + head * x_head + t.to(tl.int64)[None, :] * x_token
    w_rows = weight + head * w_head + o[:, None] * w_out
    acc = tl.zeros([BLOCK_OUT, BLOCK_T], tl.float32)
    for start in range(0, IN, BLOCK_IN):
        k = start + tl.arange(0, BLOCK_IN)
        w = tl.load(w_rows + k[None, :] * w_in, is_out[:, None] & (k < IN)[None, :], other=0.0)
        y = tl.load(x_rows + k[:, None], is_token[None, :] & (k < IN)[:, None], other=0.0)
        acc = tl.dot(w, y, acc, input_precision="ieee")
    place = out + head * out_head + t.to(tl.int64)[None, :] * out_token + o[:, None]
    keep = is_token[None, :] & is_out[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=keep)


_launch = Launcher(_multiply_heads_kernel)


def multiply_heads(x: Tensor, weight: Tensor, block_tokens: int | None = None) -> Tensor:
    """[tokens, heads, in] times [heads, out, in] -> [tokens, heads, out]. Rows of x are contiguous,
    all else may have any strides; `block_tokens` changes speed, never bits."""
    num_tokens, heads, num_in = x.shape
    num_out = weight.shape[1]
    assert weight.shape == (heads, num_out, num_in) and x.stride(2) == 1, f"{weight.shape=}"
    assert x.dtype == weight.dtype, f"{x.dtype=} {weight.dtype=}"
    out = torch.empty((num_tokens, heads, num_out), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = block_tokens or next((b for b in TOKEN_BLOCKS if num_tokens <= b), TOKEN_BLOCKS[-1])
    strides = (*x.stride()[:2], *weight.stride(), *out.stride()[:2])
    _launch(
        (triton.cdiv(num_out, BLOCK_OUT), triton.cdiv(num_tokens, block), heads),
        (x, weight, out, num_tokens, *strides),
        {
            "OUT": num_out,
            "IN": num_in,
            "BLOCK_T": block,
            "BLOCK_OUT": BLOCK_OUT,
            "BLOCK_IN": BLOCK_IN,
            "num_warps": 4,
            "num_stages": 3,
        },
        (x.dtype, strides, x.data_ptr() % 16 == 0, weight.data_ptr() % 16 == 0),
    )
    return out

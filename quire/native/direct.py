"""One native operation on tensors, at once: for models whose steps cannot be recorded."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire.native.library import Library
from quire.native.tape import GATE, GATES, NORM, Op, Step


def norm_rows(
    library: Library, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm of [tokens, width] fp32, or of the sum with a residual: (normed, what was normed)."""
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    _run(
        library,
        len(x),
        kind=NORM,
        x=x.data_ptr(),
        y=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        sum=None if residual is None else total.data_ptr(),
        weight=weight.data_ptr(),
        width=x.shape[1],
        eps=eps,
    )
    return out, total


def gate_rows(library: Library, x: Tensor, activation: str) -> Tensor:
    """[tokens, 2 * width] fp32 gate | up -> [tokens, width]."""
    x = x.contiguous()
    out = torch.empty(len(x), x.shape[1] // 2)
    at = {"x": x.data_ptr(), "out": out.data_ptr()}
    _run(library, len(x), kind=GATE, **at, width=out.shape[1], kind_of_gate=GATES[activation])
    return out


def _run(library: Library, num_rows: int, **fields: Any) -> None:
    op = Op(of_samples=False, **fields)
    library.run(ctypes.addressof(op), 1, Step(num_tokens=num_rows), 0)

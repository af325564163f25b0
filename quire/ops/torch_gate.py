"""Activations and gates of feed-forward blocks in torch, row by row alike.

Pieces of more elements than torch's grain are split between threads inside a row, and the ends of a
split go through another exp: a row's bits would depend on its place in the batch. So rows are taken
in pieces below it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.nn.ops import GateForm

MAX_SERIAL = 32768  # torch's grain size


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": _gelu,
    "relu2": _relu2,
}


def gate(x: Tensor, form: GateForm) -> Tensor:
    """[tokens, 2 * ffn] gate | up -> [tokens, ffn]."""
    if form.limit is not None:
        return clamped_swiglu(x, form.alpha, form.limit)
    act = ACTIVATIONS[form.activation]
    half = x.shape[-1] // 2
    rows = _rows_at_once(half)
    if len(x) <= rows:
        return act(x[:, :half]) * x[:, half:]
    return torch.cat([act(piece[:, :half]) for piece in x.split(rows)]) * x[:, half:]


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's: (up + 1) * gate * sigmoid(alpha * gate), gates clamped from above only, ups from
    both sides. Computed in f32 whatever the dtype and rounded once."""
    half = gate_up.shape[-1] // 2
    values = gate_up.float()
    gates = values.clamp(max=limit)
    ups = values[:, half:].clamp(-limit, limit)
    # Scaled at full width, so that the half taken from it keeps its stride: exponentials then go
    # row by row.
    scaled = (gates * alpha)[:, :half]
    pieces = [torch.sigmoid(piece) for piece in scaled.split(_rows_at_once(half))]
    share = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return ((ups + 1.0) * (gates[:, :half] * share)).to(gate_up.dtype)


def _rows_at_once(width: int) -> int:
    return max(1, (MAX_SERIAL - 1) // width)

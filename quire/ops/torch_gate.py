"""Activations and gates of feed-forward blocks in torch, element by element alike.

The library takes another exp at the end of a run, where no whole vector is left, and it splits
pieces of more elements than its grain between threads, anywhere. An element's bits would depend on
its place in the batch, and on how many columns a rank has. So rows are filled to whole vectors, and
taken in pieces below the grain.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.nn.ops import GateForm

MAX_SERIAL = 32768  # torch's grain size
VECTOR = 64  # elements; a multiple of what the library takes at once with any CPU


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": _gelu,
    "relu2": _relu2,
}


def activate(x: Tensor, activation: str) -> Tensor:
    """[tokens, width] -> the same."""
    return _whole(ACTIVATIONS[activation], x)


def gate(x: Tensor, form: GateForm) -> Tensor:
    """[tokens, 2 * ffn] gate | up -> [tokens, ffn]."""
    if form.limit is not None:
        return clamped_swiglu(x, form.alpha, form.limit)
    half = x.shape[-1] // 2
    return _whole(ACTIVATIONS[form.activation], x[:, :half]) * x[:, half:]


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gpt-oss's: (up + 1) * gate * sigmoid(alpha * gate), gates clamped from above only, ups from
    both sides. Computed in f32 whatever the dtype and rounded once."""
    half = gate_up.shape[-1] // 2
    values = gate_up.float()
    gates = values[:, :half].clamp(max=limit)
    ups = values[:, half:].clamp(-limit, limit)
    share = _whole(torch.sigmoid, gates * alpha)
    return ((ups + 1.0) * (gates * share)).to(gate_up.dtype)


def _whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of each element of [tokens, width]; all in whole vectors, whatever is beside it."""
    width = x.shape[-1]
    if missing := -width % VECTOR:
        x = F.pad(x, (0, missing))
    rows = max(1, (MAX_SERIAL - 1) // x.shape[-1])
    pieces = [function(piece) for piece in x.split(rows)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[:, :width] if missing else whole

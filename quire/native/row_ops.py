"""Operations of the native library between products and attention, each written once.

On `Rows` they are recorded, on tensors [tokens, width] fp32 they run at once: `recorder.py`. The
kernels are `src/ops.c`'s. Widths are multiples of 16.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quire.native.library import Library
from quire.native.recorder import recorder_of
from quire.native.tape import ACTIVATE, GATE, NORM, POSITIONS, ROUND, Rows
from quire.nn.ops import GateForm

GATES = {"silu": 0, "gelu": 1, "relu2": 2}
CLAMPED = 3
SMALLEST = 1e-5  # the least maximum of a row that `round_rows` assumes


def norm(
    library: Library,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(normed, what was normed): x, or the sum of x and the residual. With a bias, LayerNorm."""
    on, width = recorder_of(x, library), x.shape[-1]
    out: Tensor = on.made(x, width)
    total = x if residual is None else on.made(x, width)
    address, stride = on.place(x)
    on.do(
        NORM,
        x,
        x=address,
        x_stride=stride,
        y=None if residual is None else on.at(residual),
        out=on.at(out),
        sum=None if residual is None else on.at(total),
        weight=on.keep(weight),
        bias=None if bias is None else on.keep(bias),
        width=width,
        eps=eps,
    )
    return out, total


def norm_columns(library: Library, x: Tensor, begin: int, weight: Tensor, eps: float) -> None:
    """Some columns of x, as many as there are weights, replaced by their RMSNorm."""
    on, width = recorder_of(x, library), weight.shape[0]
    address, stride = on.place(x)
    address += 4 * begin
    on.do(
        NORM,
        x,
        x=address,
        x_stride=stride,
        out=address,
        out_stride=stride,
        weight=on.keep(weight),
        width=width,
        eps=eps,
    )


def activate(library: Library, x: Tensor, activation: str) -> Tensor:
    on = recorder_of(x, library)
    out: Tensor = on.made(x, x.shape[-1])
    at = {"x": on.at(x), "out": on.at(out)}
    on.do(ACTIVATE, x, **at, width=x.shape[-1], kind_of_gate=GATES[activation])
    return out


def gate(library: Library, x: Tensor, form: GateForm) -> Tensor:
    """[tokens, 2 * width] gate | up -> [tokens, width]."""
    on = recorder_of(x, library)
    out: Tensor = on.made(x, x.shape[-1] // 2)
    at = {"x": on.at(x), "out": on.at(out)}
    on.do(GATE, x, **at, width=out.shape[-1], **gate_fields(form))
    return out


def gate_fields(form: GateForm) -> dict[str, Any]:
    """How an operation is told which gate."""
    if form.limit is None:
        return {"kind_of_gate": GATES[form.activation]}
    return {"kind_of_gate": CLAMPED, "eps": form.alpha, "limit": form.limit}


def round_rows(library: Library, x: Tensor) -> Tensor:
    """As `ops/int8_inputs.py` does it."""
    on = recorder_of(x, library)
    out: Tensor = on.made(x, x.shape[-1])
    on.do(ROUND, x, x=on.at(x), out=on.at(out), width=x.shape[-1], eps=SMALLEST)
    return out


def add_positions(x: Rows, table: Tensor) -> Rows:
    """x plus the rows of a table [positions, width] that the tokens' positions name."""
    out = x.tape.rows(x.width, x.of_samples)
    at = {"x": x.tape.whole(x), "out": out.address, "weight": x.tape.keep(table)}
    x.tape.add(POSITIONS, x.of_samples, **at, width=x.width)
    return out

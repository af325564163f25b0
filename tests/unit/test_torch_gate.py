"""Activations of torch give an element the same bits alone, in a batch, and among fewer columns.

Turns red when the library's other exp, at the end of a run or of a thread's share, is let in.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.nn.ops import GateForm
from quire.ops import torch_gate

FORMS = {
    "silu": GateForm("silu"),
    "gelu": GateForm("gelu"),
    "clamped": GateForm("silu", 1.7, 7.0),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("width", "rows"), [(32, 3), (48, 5), (96, 16), (1024, 70)])
def test_a_gate_does_not_depend_on_company_or_ranks(name: str, width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = 3 * torch.randn(rows, 2 * width, generator=generator)
    whole = torch_gate.gate(x, FORMS[name])
    for row in range(0, rows, 7):
        assert torch.equal(torch_gate.gate(x[row : row + 1], FORMS[name])[0], whole[row])
    for num_ranks in (2, 4):
        own = width // num_ranks
        for rank in range(num_ranks):
            part = slice(rank * own, (rank + 1) * own)
            share = torch.cat((x[:, :width][:, part], x[:, width:][:, part]), 1)
            assert torch.equal(torch_gate.gate(share, FORMS[name]), whole[:, part])


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
@pytest.mark.parametrize(("width", "rows"), [(40, 3), (1000, 70)])
def test_an_activation_does_not_either(activation: str, width: int, rows: int) -> None:
    def act(x: Tensor) -> Tensor:
        return torch_gate.activate(x, activation)

    x = 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    whole = act(x)
    for row in range(0, rows, 7):
        assert torch.equal(act(x[row : row + 1])[0], whole[row])
    half = width // 2
    assert torch.equal(act(x[:, half:].contiguous()), whole[:, half:])

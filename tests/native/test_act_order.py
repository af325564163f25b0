"""Act order: columns sorted by group stay packed, and rows are brought into their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.native.tape import Step, Tape
from quire.ops.native_ops import NativeOps
from quire.quant.coded import Coded
from tests.native.weights import FORMS

NUM_IN = 96


def ordered(form: str, num_out: int, seed: int) -> Coded:
    torch.manual_seed(seed)
    weight = FORMS[form](num_out, NUM_IN)
    assert isinstance(weight, Coded)
    return replace(weight, order=torch.randperm(NUM_IN))


def parts() -> list[Coded]:
    """As of q | k | v: two of one order, one of another, one without."""
    first = ordered(SOME, 32, 0)
    like = replace(ordered(SOME, 16, 1), order=first.order)
    return [first, like, ordered(SOME, 16, 2), replace(ordered(SOME, 32, 3), order=None)]


SOME = next(name for name, make in FORMS.items() if isinstance(make(16, 32), Coded))


@pytest.mark.parametrize("form", [n for n in FORMS if isinstance(FORMS[n](16, 32), Coded)])
def test_it_is_the_sorted_weight_of_sorted_inputs(form: str, library: Library) -> None:
    """Red when a form loses its order, or applies it the wrong way round."""
    weight = ordered(form, 40, 5)
    assert weight.order is not None
    x = torch.randn(7, NUM_IN)
    straight = NativeLinear.of([replace(weight, order=None)], None, library)
    want = straight(x[:, weight.order].contiguous())
    assert torch.equal(NativeLinear.of([weight], None, library)(x), want)


def test_fused_parts_have_orders_of_their_own(library: Library) -> None:
    """Red when q's order is taken for k's. The oracle is the dequantised weight."""
    bias, x = torch.randn(96), torch.randn(5, NUM_IN)
    linear = NativeLinear.of(parts(), bias, library)
    assert len(linear.parts) == 3, "parts of one order are one"
    want = x @ torch.cat([weight.dequantize() for weight in parts()]).T + bias
    assert (linear(x) - want).norm() / want.norm() < 0.02  # inputs are rounded to int8


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_a_tape_reorders_too(num_rows: int, library: Library) -> None:
    """Red when a recorded step multiplies rows in their own order, or in that of another part."""
    linear, x = NativeLinear.of(parts(), None, library), torch.randn(num_rows, NUM_IN)
    tape = Tape(library, 16)
    rows = tape.rows(NUM_IN, False)
    normed, _ = tape.norm(rows, None, torch.ones(NUM_IN), 1e-6)
    out = linear(as_tensor(normed))
    tape.end()
    rows.memory[: x.numel()] = x.flatten()
    tape.replay(Step(num_tokens=num_rows))
    plain, _ = NativeOps(library).rms_norm(x, None, torch.ones(NUM_IN), 1e-6)
    got = out.memory[: num_rows * linear.num_out].view(num_rows, -1)  # type: ignore[attr-defined]
    assert torch.equal(got, linear(plain))


def as_tensor(rows: object) -> Tensor:
    return rows  # type: ignore[return-value]


def test_rows_of_an_embedding_are_in_their_own_order(library: Library) -> None:
    """Red when a table is read column by column as it lies."""
    weight = ordered(SOME, 48, 7)
    table = NativeOps(library).table(weight)
    ids = torch.tensor([3, 0, 47])
    assert torch.allclose(table(ids), weight.dequantize()[ids])

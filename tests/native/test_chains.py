"""An operation and the products of its rows as one job: the same bits as one after the other."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.native import row_ops
from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.native.tape import Op, Rows, Step, Tape
from quire.nn.ops import GateForm
from tests.native.weights import FORMS

WIDTH, MAX_ROWS = 768, 40  # so wide that a thread that slept wakes up in the middle
Recorded = Callable[[Tape, list[NativeLinear]], tuple[list[Rows], list[Rows]]]  # given, results


def norm_and_parts(tape: Tape, linears: list[NativeLinear]) -> tuple[list[Rows], list[Rows]]:
    x, y = tape.rows(WIDTH, False), tape.rows(WIDTH, False)
    normed, total = row_ops.norm(tape.library, x, y, torch.linspace(0.5, 2.0, WIDTH), 1e-5)
    products = [tape.product(normed, linear.parts) for linear in linears]
    return [x, y], [normed, total, *products]


def gate_then_product(tape: Tape, linears: list[NativeLinear]) -> tuple[list[Rows], list[Rows]]:
    x = tape.rows(2 * WIDTH, False)
    gated = row_ops.gate(tape.library, x, GateForm("silu"))
    return [x], [gated, *(tape.product(gated, linear.parts) for linear in linears)]


def layer_norm_of_columns(tape: Tape, linears: list[NativeLinear]) -> tuple[list[Rows], list[Rows]]:
    x = tape.rows(WIDTH + 64, False)
    part, weight = x[:, 32 : 32 + WIDTH], torch.linspace(0.5, 2.0, WIDTH)
    normed, _ = row_ops.norm(tape.library, part, None, weight, 1e-5, bias=weight - 1)
    return [x], [normed, *(tape.product(normed, linear.parts) for linear in linears)]


def activation_then_product(
    tape: Tape, linears: list[NativeLinear]
) -> tuple[list[Rows], list[Rows]]:
    x = tape.rows(WIDTH, False)
    active = row_ops.activate(tape.library, x, "gelu")
    rounded = row_ops.round_rows(tape.library, active)
    return [x], [active, rounded, *(tape.product(rounded, linear.parts) for linear in linears)]


def columns_normed_in_place(
    tape: Tape, linears: list[NativeLinear]
) -> tuple[list[Rows], list[Rows]]:
    """No thread may norm again what another has normed already."""
    x = tape.rows(WIDTH, False)
    own = row_ops.round_rows(tape.library, x)
    row_ops.norm_columns(tape.library, own, 0, torch.linspace(0.5, 2.0, WIDTH), 1e-5)
    return [x], [own, *(tape.product(own, linear.parts) for linear in linears)]


def product_over_what_was_normed(
    tape: Tape, linears: list[NativeLinear]
) -> tuple[list[Rows], list[Rows]]:
    """The rows before the norm are not needed any more: the product takes their memory."""
    x, y = tape.rows(WIDTH, False), tape.rows(WIDTH, False)
    normed, _ = row_ops.norm(tape.library, x, y, torch.ones(WIDTH), 1e-5)
    given = [Rows(tape, rows.memory, WIDTH, False) for rows in (x, y)]
    del x, y
    product = tape.product(normed, linears[1].parts)
    assert product.address in [rows.address for rows in given]
    return given, [product]


def run(tape: Tape, given: list[Rows], values: list[Tensor], at_once: bool) -> None:
    num_rows = len(values[0])
    for rows, value in zip(given, values, strict=True):
        rows.memory.view(-1, rows.width)[:num_rows] = value
    step = Step(num_tokens=num_rows)
    if at_once:
        tape.replay(step)
        return
    ops, scratch = ctypes.addressof(tape._array), tape._scratch.data_ptr()
    for i in range(len(tape.ops)):
        tape.library.run(ops + i * ctypes.sizeof(Op), 1, step, scratch)


@pytest.mark.parametrize(
    "recorded",
    [
        norm_and_parts,
        gate_then_product,
        layer_norm_of_columns,
        activation_then_product,
        columns_normed_in_place,
        product_over_what_was_normed,
    ],
)
@pytest.mark.parametrize("form", ["4 bits, offsets", "fp32"])
def test_a_chain_is_its_operations(recorded: Recorded, form: str, library: Library) -> None:
    """Red when a thread multiplies rows that are not made yet or already written over, or when the
    rows are left unmade because others did all the multiplying."""
    torch.manual_seed(0)
    linears = [
        NativeLinear.of([FORMS[form](WIDTH, WIDTH), FORMS["6 bits"](48, WIDTH)], None, library),
        NativeLinear.of([FORMS[form](WIDTH, WIDTH)], None, library),
    ]
    tape = Tape(library, MAX_ROWS)
    given, results = recorded(tape, linears)
    tape.end()
    for num_rows in (1, 3, 4, 5, MAX_ROWS):
        values = [torch.randn(num_rows, rows.width) for rows in given]
        library.set_threads(1)
        run(tape, given, values, at_once=False)
        want = [rows.memory.view(-1, rows.width)[:num_rows].clone() for rows in results]
        for threads in (1, 2, 3):
            library.set_threads(threads)
            for _ in range(10):
                for rows in results:
                    rows.memory.fill_(float("nan"))
                run(tape, given, values, at_once=True)
                got = [rows.memory.view(-1, rows.width)[:num_rows] for rows in results]
                assert all(map(torch.equal, got, want)), (num_rows, threads)

"""Native products: right in every format, the same bits in any company, thread and instruction set.

There are two oracles: `exact.py`, the arithmetic of whole numbers written out, which products must
equal to the bit, and fp64 arithmetic on dequantised weights, which they must come near.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.quant.coded import Coded
from quire.quant.weight import Dense, Weight
from tests.native import exact
from tests.native.weights import FORMS, blocks

MAX_ROWS = 65
MOST = {"float": 127 * 128, "int8-row": 127}
SHAPES = ((16, 32), (33, 64), (100, 576))  # (outputs, inputs)


def expected(weight: Weight, x: Tensor) -> Tensor:
    """fp64. Of whole numbers, for activations as the kernels round them."""
    inputs = x.double()
    if isinstance(weight, Coded):
        numbers, scales = exact.rounded(x.numpy(), MOST[weight.inputs])
        inputs = torch.from_numpy(numbers * scales.astype("float64"))
    return inputs @ weight.dequantize().double().T


@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, library: Library) -> None:
    """Red when codes are unpacked wrongly, a sum is not exact or rounded elsewhere than decision 9
    says, or bits follow rows, threads or instruction sets."""
    torch.manual_seed(0)
    for shape in SHAPES:
        weight, bias = FORMS[form](*shape), torch.randn(shape[0])
        linear, x = NativeLinear.of([weight], bias, library), torch.randn(MAX_ROWS, shape[1])
        want = expected(weight, x) + bias.double()
        library.use_isa(library.isas[0])
        library.set_threads(1)
        whole = linear(x)
        error = (whole.double() - want).norm() / want.norm()
        assert error < 2e-6, (shape, error)
        if isinstance(weight, Coded):
            assert np.array_equal(whole.numpy(), exact.product(x, weight) + bias.numpy()), shape
        for isa in library.isas:
            library.use_isa(isa)
            assert torch.equal(linear(x), whole), (shape, isa)
            for rows in range(1, MAX_ROWS):
                assert torch.equal(linear(x[:rows]), whole[:rows]), (shape, isa, rows)
        library.use_isa(library.isas[0])
        for threads in (2, 3):
            library.set_threads(threads)
            for rows in (1, 2, 5, 8, 13, 65):
                assert torch.equal(linear(x[-rows:]), whole[-rows:]), (shape, threads, rows)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_weight(form: str, library: Library) -> None:
    """Red when an embedding reads another row than the product does, or rounds otherwise."""
    torch.manual_seed(1)
    weight = FORMS[form](50, 64)
    ids = torch.tensor([0, 49, 7, 16, 15, 33, 7])
    want = weight.dequantize().float()
    for isa in library.isas:
        library.use_isa(isa)
        assert torch.equal(NativeLinear.of([weight], None, library).rows(ids), want[ids]), isa


def test_parts_of_different_formats(library: Library) -> None:
    """Red when a part's columns land elsewhere, or a bias is cut at the wrong place."""
    torch.manual_seed(2)
    parts = [FORMS["4 bits"](48, 64), FORMS["4 bits"](16, 64), FORMS["6 bits"](20, 64)]
    parts += [Dense(torch.randn(7, 64))]
    bias, x = torch.randn(91), torch.randn(5, 64)
    linear = NativeLinear.of(parts, bias, library)
    assert [part.num_out for part in linear.parts] == [64, 20, 7]  # like neighbours became one
    want = torch.cat([expected(part, x) for part in parts], 1) + bias.double()
    assert torch.allclose(linear(x).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e30])
def test_activations_of_any_size(scale: float, library: Library) -> None:
    """Red when a row of zeros or denormals divides by zero."""
    torch.manual_seed(3)
    weight = blocks(4, 32, 8, False)(16, 64)
    assert isinstance(weight, Coded)
    x = torch.randn(3, 64) * scale
    x[1, 32:] = 0.0
    want = expected(weight, x)
    for isa in library.isas:
        library.use_isa(isa)
        got = NativeLinear.of([weight], None, library)(x).double()
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-40), isa


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_does_not_become_one(wrong: float, library: Library) -> None:
    """Red when a broken activation turns into a plausible answer."""
    weight, x = FORMS["4 bits"](16, 64), torch.randn(2, 64)
    x[1, 40] = wrong
    for isa in library.isas:
        library.use_isa(isa)
        out = NativeLinear.of([weight], None, library)(x)
        assert out[0].isfinite().all() and out[1].isnan().all(), isa


@pytest.mark.parametrize("form", ["8 bits", "8 bits, zeros", "6 bits", "5 bits", "table"])
def test_sums_of_the_largest_numbers(form: str, library: Library) -> None:
    """Red when pairs of products saturate or a sum leaves its 32 bits: all codes and inputs are the
    largest of their kind, of one sign or of both."""
    weight = FORMS[form](16, 64)
    assert isinstance(weight, Coded)
    signs = torch.tensor([1.0, -1.0])
    x = torch.stack([torch.ones(64), -torch.ones(64), signs.repeat(32)])
    x[:, 1] = 0.4961  # of the low plane's largest numbers
    for code in (0, 127, 128, 2**weight.bits - 1):
        extreme = replace(weight, codes=torch.full_like(weight.codes, code % 2**weight.bits))
        for isa in library.isas:
            library.use_isa(isa)
            got = NativeLinear.of([extreme], None, library)(x)
            assert np.array_equal(got.numpy(), exact.product(x, extreme)), (isa, code)


def test_a_kind_without_a_kernel_is_refused(library: Library) -> None:
    """Red when a new format reaches the library before its kernel does: that kills the process."""
    weight = blocks(2, 16, 0, False)(16, 64)
    with pytest.raises(AssertionError, match="no kernel for 2 bits"):
        NativeLinear.of([weight], None, library)


def test_a_wide_weight(library: Library) -> None:
    """Red when the last blocks of many get others' scales."""
    torch.manual_seed(4)
    weight = FORMS["4 bits, offsets"](17, 32 * 600)
    assert isinstance(weight, Coded)
    x = torch.randn(9, 32 * 600)
    want = expected(weight, x)
    got = NativeLinear.of([weight], None, library)(x).double()
    assert (got - want).norm() / want.norm() < 1e-3  # large terms cancel


@pytest.mark.parametrize("form", ["4 bits, offsets", "6 bits", "bf16"])
def test_more_rows_than_one_unit_of_work_has(form: str, library: Library) -> None:
    """Red when a unit reads or writes the rows of another."""
    torch.manual_seed(6)
    linear = NativeLinear.of([FORMS[form](100, 64)], None, library)
    x = torch.randn(300, 64)
    want = torch.cat([linear(part) for part in x.split(7)])
    for threads in (1, 2):
        library.set_threads(threads)
        assert torch.equal(linear(x), want)


def test_two_engines_may_multiply_at_once(library: Library) -> None:
    """Red when jobs of two callers mix in the pool: wrong numbers, or a wait without end."""
    torch.manual_seed(5)
    library.set_threads(2)
    linear = NativeLinear.of([FORMS["4 bits"](1024, 64)], None, library)
    inputs = [torch.randn(rows, 64) for rows in (1, 3, 8, 20)]
    wants = [linear(x) for x in inputs]

    def work(which: int) -> bool:
        return all(torch.equal(linear(inputs[which]), wants[which]) for _ in range(300))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))

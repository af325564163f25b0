"""One contract for every packed form on a CPU: the stated arithmetic, and bits for any rows.

Up to 257 rows, outputs and inputs that fill no panel and no tile, groups of zeros. `test_products`
has every count of rows up to 65 in every instruction set.
"""

from __future__ import annotations

import pytest
import torch

from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.quant.scaled import Scaled
from quire.quant.weight import Dense
from tests.native.test_products import expected
from tests.native.weights import FORMS, with_zeros

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 144, 255, 256, 257)
SHAPES = ((16, 32), (17, 96), (50, 160), (113, 224))


@pytest.mark.parametrize("form", FORMS)
def test_rows_up_to_257(form: str, library: Library) -> None:
    """Red when a tile, a unit of work or a matrix unit gives a row other bits than it has alone."""
    torch.manual_seed(7)
    library.use_isa(library.isas[0])
    library.set_threads(2)
    for shape in SHAPES:
        weight = with_zeros(FORMS[form](*shape))
        linear, x = NativeLinear.of([weight], None, library), torch.randn(257, shape[1])
        whole, want = linear(x), expected(weight, x)
        assert (whole.double() - want).norm() <= 2e-6 * want.norm(), shape
        for rows in ROWS:
            assert torch.equal(linear(x[:rows]), whole[:rows]), (shape, rows)
        assert torch.equal(linear(x[200:201]), whole[200:201])


@pytest.mark.parametrize("form", [f for f in FORMS if f.startswith(("e4m3", "e5m2", "16 values"))])
def test_floats_with_scales_are_as_if_expanded(form: str, library: Library) -> None:
    """Red when a float of few bits is not exactly the number it stands for."""
    torch.manual_seed(8)
    weight = FORMS[form](40, 96)
    x = torch.randn(9, 96)
    for isa in library.isas:
        library.use_isa(isa)
        packed = NativeLinear.of([weight], None, library)
        plain = NativeLinear.of([Dense(weight.dequantize())], None, library)
        assert torch.equal(packed(x), plain(x)), isa
        assert packed.parts[0].num_bytes < plain.parts[0].num_bytes / 2


@pytest.mark.parametrize("form", ["fp16 2:4", "bf16 2:4"])
def test_two_of_four_are_as_if_expanded(form: str, library: Library) -> None:
    """Red when a value meets another input than its own, in another order, or takes more than 9
    bits."""
    torch.manual_seed(9)
    weight = FORMS[form](48, 96)
    x = torch.randn(9, 96)
    for isa in library.isas:
        library.use_isa(isa)
        packed = NativeLinear.of([weight], None, library)
        plain = NativeLinear.of([Dense(weight.dequantize())], None, library)
        for rows in (1, 2, 5, 9):
            assert torch.equal(packed(x[:rows]), plain(x[:rows])), (isa, rows)
        assert packed.parts[0].num_bytes * 16 == plain.parts[0].num_bytes * 9


def test_every_eight_bit_float(library: Library) -> None:
    """Red when one of the 256 is read as another number: each alone times one."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = numbers.view(torch.uint8)[numbers.half().isfinite()].view(dtype).unsqueeze(1)
        weight = Scaled(finite, torch.ones(1, 1), (len(finite), 1))
        for isa in library.isas:
            library.use_isa(isa)
            got = NativeLinear.of([weight], None, library)(torch.ones(1, 1))
            assert torch.equal(got[0], finite.float()[:, 0]), (dtype, isa)


def test_no_number_is_expanded(library: Library) -> None:
    """Red when a NaN among eight-bit floats becomes 480: kernels know no NaN there."""
    from quire.native.panels import can_be_panels

    tensor = torch.full((16, 32), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert not can_be_panels(Scaled(tensor, torch.ones(1, 1), (16, 32)))

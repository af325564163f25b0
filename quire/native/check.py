"""A look at an instruction set before it is used: its products must be plain C's, bit for bit."""

from __future__ import annotations

import torch

from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.quant.coded import Coded
from quire.quant.weight import Dense, Weight

# Rows of a matrix unit and a tile beside them; tiles of every size; panels for a group of them and
# a ragged one more.
ROWS, OUTPUTS, INPUTS = 17, 72, 64
FEWER_ROWS = range(1, 9)
FORMS = ((4, 32, False), (4, 32, True), (6, 16, False), (8, 32, False))  # bits, block, offsets


def agrees_with_plain(library: Library, isa: str) -> bool:
    """Leaves the library with this instruction set."""
    numbers = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=numbers, device="cpu")
    weights: list[Weight] = [Dense(torch.randn(OUTPUTS, INPUTS, generator=numbers, device="cpu"))]
    for bits, block, has_offsets in FORMS:
        size = (OUTPUTS, INPUTS)
        codes = torch.randint(0, 2**bits, size, generator=numbers, device="cpu").byte()
        scales = torch.rand(OUTPUTS, INPUTS // block, generator=numbers, device="cpu").half()
        offsets = scales if has_offsets else None
        weights.append(Coded(codes, bits, block, scales, offsets=offsets))
    linears = [NativeLinear.of([weight], None, library) for weight in weights]
    inputs = [x, *(x[:count] for count in FEWER_ROWS)]
    found = [linear(some) for linear in linears for some in inputs]
    library.use_isa("plain")
    wanted = [linear(some) for linear in linears for some in inputs]
    library.use_isa(isa)
    return all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))

"""A look at an instruction set before it is used: its products must be plain C's, bit for bit."""

from __future__ import annotations

import torch

from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.quant.coded import Coded
from quire.quant.weight import Dense, Weight

ROWS, OUTPUTS, INPUTS = 9, 24, 64


def agrees_with_plain(library: Library, isa: str) -> bool:
    """Leaves the library with this instruction set."""
    numbers = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=numbers, device="cpu")
    weights: list[Weight] = [Dense(torch.randn(OUTPUTS, INPUTS, generator=numbers, device="cpu"))]
    for bits, has_offsets in ((4, False), (4, True), (8, False)):
        size = (OUTPUTS, INPUTS)
        codes = torch.randint(0, 2**bits, size, generator=numbers, device="cpu").byte()
        scales = torch.rand(OUTPUTS, INPUTS // 32, generator=numbers, device="cpu").half()
        weights.append(Coded(codes, bits, 32, scales, offsets=scales if has_offsets else None))
    linears = [NativeLinear.of([weight], None, library) for weight in weights]
    found = [linear(x) for linear in linears]
    library.use_isa("plain")
    wanted = [linear(x) for linear in linears]
    library.use_isa(isa)
    return all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))

"""Random weights in every form that the native kernels multiply with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.load_forms import E2M1_TABLE
from quire.quant.scaled import Scaled, ceil
from quire.quant.sparse24 import Sparse24
from quire.quant.weight import Dense, Inputs, Weight

Form = Callable[[int, int], Weight]  # (outputs, inputs) -> a weight


def codes(bits: int, num_out: int, num_in: int) -> Tensor:
    return torch.randint(0, 2**bits, (num_out, num_in), dtype=torch.uint8)


def halves(num_out: int, num: int) -> Tensor:
    return (torch.rand(num_out, num) * 0.1 + 0.01).half()


def blocks(bits: int, block: int, zero: int, has_offsets: bool) -> Form:
    def make(num_out: int, num_in: int) -> Coded:
        num = num_in // block
        offsets = halves(num_out, num) - 0.05 if has_offsets else None
        scales = halves(num_out, num)
        return Coded(codes(bits, num_out, num_in), bits, block, scales, zero, offsets)

    return make


def two_levels(bits: int, block: int, zero: int, dtype: torch.dtype, has_offsets: bool) -> Form:
    def make(num_out: int, num_in: int) -> Coded:
        num, size = num_in // block, num_in // block  # one super block a row

        def small() -> Tensor:
            low = -32 if dtype == torch.int8 else 0
            return torch.randint(low, 32, (num_out, num), dtype=dtype)

        return Coded(
            codes(bits, num_out, num_in),
            bits,
            block,
            small(),
            zero,
            small() if has_offsets else None,
            size,
            halves(num_out, 1),
            -halves(num_out, 1) if has_offsets else None,
        )

    return make


def six_bits(num_out: int, num_in: int) -> Coded:
    """Q3_K's: codes of three bits, scales of six."""
    made = two_levels(3, 16, 4, torch.int8, False)(num_out, num_in)
    return replace(made, bits=4, scales=torch.randint(-32, 32, made.scales.shape, dtype=torch.int8))


def nibbles(num_out: int, num_in: int) -> Coded:
    """Q2_K's: scale and offset share a byte."""
    made = two_levels(2, 16, 0, torch.uint8, True)(num_out, num_in)
    assert made.offsets is not None
    return replace(made, scales=made.scales % 16, offsets=made.offsets % 16)


def eighths(kind: Literal["times", "over"]) -> Form:
    """NVFP4's: any E4M3 without a sign for 16 inputs, below one number for a row."""

    def make(num_out: int, num_in: int) -> Coded:
        scales = torch.randint(0, 0x7F, (num_out, num_in // 16), dtype=torch.uint8)
        above = torch.rand(num_out, 1) + 0.5
        above = above * 1e3 if kind == "over" else above * 1e-3
        whole = codes(4, num_out, num_in)
        return Coded(
            *(whole, 4, 16, scales),
            super_scales=above,
            table=E2M1_TABLE,
            eighths=kind,
        )

    return make


def groups(
    bits: int, share: int, has_zeros: bool, inputs: Inputs = "float", block: int = 32
) -> Form:
    """Several blocks share a scale, and a zero of their own; odd widths have fewer that do."""

    def make(num_out: int, num_in: int) -> Coded:
        each = share if num_in // block % share == 0 else 1
        num = num_in // block // each
        zeros = None
        if has_zeros:
            low, high, kind = 0, 2**bits, torch.uint8
            if bits == 8:
                low, high, kind = -128, 128, torch.int8
            zeros = torch.randint(low, high, (num_out, num)).to(kind)
        scales, zero = halves(num_out, num), 0 if has_zeros or bits == 8 else 2 ** (bits - 1)
        whole = codes(bits, num_out, num_in)
        made = Coded(whole, bits, block, scales, zero, share=each, zeros=zeros)
        return replace(made, inputs=inputs)

    return make


def brain_scales(num_out: int, num_in: int) -> Coded:
    """As files have them: bf16, which fp16 does not hold."""
    scales = (torch.rand(num_out, num_in // 32) * 1e-6).bfloat16().float()
    return Coded(codes(4, num_out, num_in), 4, 32, scales, zero=8)


def table(num_out: int, num_in: int, block: int = 32) -> Coded:
    values = tuple(torch.randint(-127, 128, (16,)).tolist())
    scales = halves(num_out, num_in // block)
    return Coded(codes(4, num_out, num_in), 4, block, scales, table=values)


def own_tables(num_out: int, num_in: int) -> Coded:
    """Every four rows have values of their own; a row has one scale."""
    values = torch.randint(-127, 128, (-(-num_out // 4), 16), dtype=torch.int8)
    tables = values.repeat_interleave(4, 0)[:num_out]
    scales = halves(num_out, 1)
    return Coded(codes(4, num_out, num_in), 4, 32, scales, tables=tables, share=num_in // 32)


def powers(num_out: int, num_in: int, low: int = 110, high: int = 135) -> Coded:
    """Exponents from low on, below high."""
    values = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    exponents = torch.randint(low, high, (num_out, num_in // 32), dtype=torch.uint8)
    return Coded(codes(4, num_out, num_in), 4, 32, exponents, table=values, are_powers=True)


def floats(dtype: torch.dtype) -> Form:
    return lambda num_out, num_in: Dense(torch.randn(num_out, num_in).to(dtype))


def eight_bits(dtype: torch.dtype, block: tuple[int, int]) -> Form:
    """All numbers of eight bits, the smallest and the zeros too; (0, 0): one scale for all."""

    def make(num_out: int, num_in: int) -> Scaled:
        height, width = block[0] or num_out, block[1] or num_in
        whole = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = torch.arange(256)[whole.half().isfinite()]
        bytes_ = finite[torch.randint(0, len(finite), (num_out, num_in))].byte()
        scales = torch.rand(ceil(num_out, height), ceil(num_in, width)) * 0.01
        return Scaled(bytes_.view(dtype), scales, (height, width))

    return make


def values(block: int) -> Form:
    def make(num_out: int, num_in: int) -> Codebook:
        numbers = tuple(torch.randn(16).tolist())
        scales = torch.rand(num_out, num_in // block)
        return Codebook(codes(4, num_out, num_in), numbers, scales)

    return make


def two_of_four(dtype: torch.dtype) -> Form:
    def make(num_out: int, num_in: int) -> Sparse24:
        runs = torch.randn(num_out, num_in // 4, 4)
        gone = torch.rand_like(runs).argsort(-1)[..., :2]
        return Sparse24.of(runs.scatter_(-1, gone, 0.0).to(dtype).view(num_out, num_in))

    return make


def with_zeros(weight: Weight) -> Weight:
    """The same with a group of zeros in every other row."""
    if isinstance(weight, Dense):
        weight.tensor[::2, :32] = 0
        return weight
    if isinstance(weight, Sparse24):
        weight.values[::2, :16] = 0
        return weight
    if isinstance(weight, (Scaled, Codebook)):
        scales = weight.scales.clone()
        scales[::2, 0] = 0
        return replace(weight, scales=scales)
    assert isinstance(weight, Coded)
    if weight.are_powers:  # no power is zero, but a code is
        codes = weight.codes.clone()
        codes[::2, :32] = 0
        return replace(weight, codes=codes)
    offsets = weight.offsets
    scales = weight.scales.clone()
    scales[::2, 0] = 0
    if offsets is not None:
        offsets = offsets.clone()
        offsets[::2, 0] = 0
    return replace(weight, scales=scales, offsets=offsets)


FORMS: dict[str, Form] = {
    "2 bits": blocks(2, 32, 1, False),
    "2 bits, offsets, two levels": two_levels(2, 16, 0, torch.uint8, True),
    "2 bits, nibbles, two levels": nibbles,
    "3 bits in 16": six_bits,
    "e2m1 in 16, e4m3 times one": eighths("times"),
    "e2m1 in 16, e4m3 over one": eighths("over"),
    "4 bits in 16": two_levels(4, 16, 4, torch.int8, False),
    "4 bits": blocks(4, 32, 8, False),
    "4 bits, offsets": blocks(4, 32, 0, True),
    "4 bits, offsets, two levels": two_levels(4, 32, 0, torch.uint8, True),
    "5 bits": blocks(5, 32, 16, False),
    "5 bits, offsets": blocks(5, 32, 0, True),
    "6 bits": two_levels(6, 16, 32, torch.int8, False),
    "8 bits": blocks(8, 32, 0, False),
    "4 bits, groups": groups(4, 2, False),
    "4 bits, zeros": groups(4, 2, True),
    "2 bits, zeros": groups(2, 2, True),
    "8 bits, zeros": groups(8, 2, True),
    "4 bits in 16, zeros": groups(4, 1, True, block=16),
    "2 bits in 16, zeros": groups(2, 2, True, block=16),
    "5 bits, zeros": groups(5, 2, True),
    "6 bits in 16, zeros": groups(6, 2, True, block=16),
    "4 bits, bf16 scales": brain_scales,
    "table in 16": lambda num_out, num_in: table(num_out, num_in, 16),
    "2 bits, int8 inputs": groups(2, 2, False, "int8-row"),
    "4 bits, int8 inputs": groups(4, 2, False, "int8-row"),
    "8 bits, int8 inputs": groups(8, 2, False, "int8-row"),
    "4 bits, zeros, int8 inputs": groups(4, 2, True, "int8-row"),
    "table": table,
    "table, powers": powers,
    "tables of four rows": own_tables,
    "e4m3, rows": eight_bits(torch.float8_e4m3fn, (1, 0)),
    "e4m3, blocks": eight_bits(torch.float8_e4m3fn, (32, 48)),
    "e4m3, narrow blocks": eight_bits(torch.float8_e4m3fn, (24, 16)),
    "e5m2, one scale": eight_bits(torch.float8_e5m2, (0, 0)),
    "16 values in 32": values(32),
    "16 values in 8": values(8),
    "fp16 2:4": two_of_four(torch.float16),
    "bf16 2:4": two_of_four(torch.bfloat16),
    "fp32": floats(torch.float32),
    "fp16": floats(torch.float16),
    "bf16": floats(torch.bfloat16),
}

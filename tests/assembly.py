"""The few PTX instructions that kernels use, run on arrays of registers.

The interpreter knows no assembly. Registers of two 16-bit numbers are uint32 arrays here, and every
instruction does what the PTX manual says of it; sums are rounded once, from fp64.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def run(text: str, inputs: list[Words], num_outputs: int) -> list[Words]:
    """The output registers of a block of assembly."""
    registers = {f"${num_outputs + i}": x for i, x in enumerate(inputs)}
    halves = r"mov\.b32 {(\w+), (\w+)}, ([$\w]+);"
    text = re.sub(halves, r"and.b32 \1, \3, 0xFFFF; shr.b32 \2, \3, 16;", text)
    for line in re.sub(r"[{}]", "", text).split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        name, rest = line.strip().split(None, 1)
        target, *sources = [part.strip() for part in rest.split(",")]
        values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
        registers[target] = np.asarray(OPS[name](*values), np.uint32)
    shape = inputs[0].shape
    return [np.broadcast_to(registers[f"${i}"], shape) for i in range(num_outputs)]


def _lop3(a: Words, b: Words, c: Words, table: np.uint32) -> Words:
    made = np.zeros_like(a | b | c)
    for i in range(8):  # bit i of the table: what becomes of the bits (a, b, c) = i
        if int(table) >> i & 1:
            term = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            made |= term[0] & term[1] & term[2]
    return made


def _in_pairs(of: Callable[[Words], Words], back: Callable[[Words], Words]) -> Callable[..., Words]:
    def fma(a: Words, b: Words, c: Words) -> Words:
        halves = []
        for shift in (0, 16):
            x, y, z = (
                of((np.asarray(part) >> shift) & 0xFFFF).astype(np.float64) for part in (a, b, c)
            )
            halves.append(back(x * y + z))
        return halves[0] | halves[1] << 16

    return fma


def _of_bf16(bits: Words) -> Words:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(x: Words) -> Words:
    bits = x.astype(np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def _permute(a: Words, b: Words, selector: np.uint32) -> Words:
    """Byte i of the result is the byte of b:a that digit i of the selector names."""
    assert not int(selector) & 0x8888, "no digit repeats a sign here"
    both = [np.asarray(x) >> shift & 0xFF for x in (a, b) for shift in (0, 8, 16, 24)]
    made = [both[int(selector) >> 4 * i & 7] << np.uint32(8 * i) for i in range(4)]
    return np.asarray(made[0] | made[1] | made[2] | made[3], np.uint32)


def _from_e4m3(pair: Words) -> Words:
    """Two codes in the low half of a register as two numbers of fp16."""
    codes = np.ascontiguousarray(pair).astype(np.uint16).view(np.uint8)
    numbers = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).half().numpy()
    return numbers.view(np.uint32)


def _in_fp32(of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., Words]:
    def run(a: Words, b: Words) -> Words:
        x, y = (np.atleast_1d(np.asarray(part, np.uint32)).view(np.float32) for part in (a, b))
        return np.asarray(of(x, y), np.float32).view(np.uint32)

    return run


def _fma32(a: Words, b: Words, c: Words) -> Words:
    x, y, z = (np.asarray(part).view(np.float32).astype(np.float64) for part in (a, b, c))
    return np.asarray(x * y + z, np.float32).view(np.uint32)


def _pair(back: Callable[[Words], Words]) -> Callable[..., Words]:
    def run(high: Words, low: Words) -> Words:
        above, below = (back(x.view(np.float32)) for x in (high, low))
        return np.asarray(below | above << 16, np.uint32)

    return run


OPS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "fma.rn.f32": _fma32,
    "sub.rn.f32": _in_fp32(lambda x, y: x - y),
    "mul.rn.f32": _in_fp32(lambda x, y: x * y),
    "cvt.f32.f16": lambda a: (
        a.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    ),
    "cvt.rn.bf16x2.f32": _pair(lambda x: _to_bf16(x)),
    "cvt.rn.f16x2.f32": _pair(lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32)),
    # A register that is read by lane: an array of 32.
    "shfl.sync.idx.b32": lambda a, lane, *_: a[np.asarray(lane) & 31],
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "lop3.b32": _lop3,
    "prmt.b32": _permute,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "fma.rn.bf16x2": _in_pairs(_of_bf16, _to_bf16),
    "fma.rn.f16x2": _in_pairs(
        lambda bits: bits.astype(np.uint16).view(np.float16),
        lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32),
    ),
}

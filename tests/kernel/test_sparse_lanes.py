"""2:4 weights in the order of a matrix instruction's lanes: what each thread makes of its words is
the weight, and the slabs expand to it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401 (before anything loads triton)
from quire.kernels.expand import embed_packed, expand
from quire.kernels.matmul import interleave
from quire.kernels.sparse_unpack import BASES, FACTORS, PER_WORD, unpack_text
from quire.ops.slabs_of import slabs_of
from quire.quant.sparse24 import Sparse24

MASK = 2**32 - 1


def _weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Sparse24:
    """With every pattern of a run, values of all bits, and minus zeros among them."""
    values = torch.randint(-(2**15), 2**15, (n, k // 2)).short().view(dtype)
    values = torch.where(values.isfinite(), values, -torch.zeros_like(values))
    pairs = torch.combinations(torch.arange(4))
    chosen = pairs[torch.randint(len(pairs), (n, k // 4))]
    return Sparse24(values, (chosen[..., 0] | chosen[..., 1] << 2).byte())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def _permuted(low: int, high: int, selector: int) -> int:
    """What `prmt.b32` makes of eight bytes."""
    found = (high << 32 | low).to_bytes(8, "little")
    out = []
    for nibble in range(4):
        index = selector >> 4 * nibble & 15
        byte = found[index & 7]
        out.append((0xFF if byte & 0x80 else 0) if index & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def _run(text: str, registers: dict[str, int]) -> None:
    """The instructions of `unpack_text`."""
    for opcode, rest in re.findall(r"(\w+\.\w+(?:\.\w+)?) ([^;]+);", text):
        if opcode.startswith("reg"):
            continue
        target, *names = rest.split(", ")
        args = [registers[name] if name in registers else int(name, 0) for name in names]
        match opcode:
            case "shr.u32":
                registers[target] = args[0] >> args[1]
            case "and.b32":
                registers[target] = args[0] & args[1]
            case "mad.lo.u32":
                registers[target] = args[0] * args[1] + args[2] & MASK
            case "prmt.b32":
                registers[target] = _permuted(*args)
            case _:
                raise AssertionError(opcode)


def _threads(values: Tensor, words: Tensor) -> Iterator[tuple[int, int, list[int]]]:
    """Of a row of a slab: each thread's s and h, and the pairs of weights it makes."""
    outputs, pairs = ([f"{name}{i}" for i in range(PER_WORD)] for name in "op")
    text = unpack_text(outputs, pairs, "bits", "factor", "base")
    for s in range(2):
        for h in range(2):
            own = {
                name: int(pair) & MASK for name, pair in zip(pairs, values[16 * s :], strict=False)
            }
            bits = int(words[2 * s + h]) & MASK
            registers = own | {"bits": bits, "factor": FACTORS[h], "base": BASES[h]}
            _run(text, registers)
            yield s, h, [registers[name] for name in outputs]


def test_what_threads_make_is_the_weight() -> None:
    """Red when a value is stored, or a selector made, for another place than the instruction's."""
    torch.manual_seed(0)
    weight = _weight(8, 256)
    slabs = slabs_of(weight, False, torch.bfloat16)
    assert slabs is not None and slabs.form.lanes and slabs.values is not None
    want = _bits(weight.dequantize())
    for slab in range(2):
        for row in range(8):
            values = slabs.values[slab, row].view(torch.int32)
            made = torch.zeros(128, dtype=torch.int16)
            for s, h, pairs in _threads(values, slabs.codes[slab, row].view(torch.int32)):
                for register, pair in enumerate(pairs):
                    field, j, c = register // 8, register // 2 % 4, register % 2
                    k = 64 * field + 16 * j + 8 * c + 4 * s + 2 * h
                    made[k : k + 2] = (
                        torch.tensor([pair], dtype=torch.int64).int().view(torch.int16)
                    )
            assert torch.equal(made, want[row, 128 * slab : 128 * slab + 128]), (slab, row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("paired", [False, True])
def test_expanded(dtype: torch.dtype, paired: bool) -> None:
    """Red when a value or a bit is stored where `unpack_sparse.py` does not look for it."""
    torch.manual_seed(1)
    weight = _weight(64, 512, dtype)
    slabs = slabs_of(weight, paired, dtype)
    assert slabs is not None and slabs.form.lanes
    dense = weight.dequantize()
    dense = interleave(dense) if paired else dense
    assert torch.equal(_bits(expand(slabs, torch.empty_like(dense))), _bits(dense))
    ids = torch.tensor([5, 0, 63])
    assert torch.equal(_bits(embed_packed(slabs, ids, dtype)), _bits(dense[ids]))


def test_what_takes_the_other_kernel() -> None:
    """Red when a weight is laid out for a kernel that cannot read it."""
    for weight, dtype in (
        (_weight(64, 192), torch.bfloat16),  # no whole slabs
        (_weight(64, 128), torch.bfloat16),  # one stage
        (_weight(63, 512), torch.bfloat16),  # rows that no portion divides
        (_weight(64, 512), torch.float32),  # no matrix instruction
    ):
        slabs = slabs_of(weight, False, dtype)
        assert slabs is not None and not slabs.form.lanes


def test_values_are_rounded_to_the_inputs() -> None:
    """Red when a kernel would take bits of one float for those of another."""
    torch.manual_seed(2)
    weight = Sparse24(torch.randn(64, 256), _weight(64, 512).places)
    slabs = slabs_of(weight, False, torch.bfloat16)
    assert slabs is not None and slabs.form.lanes
    dense = weight.dequantize().bfloat16()
    assert torch.equal(_bits(expand(slabs, torch.empty_like(dense))), _bits(dense))


def test_bytes_are_nine_bits_a_weight() -> None:
    slabs = slabs_of(_weight(64, 512), False, torch.bfloat16)
    assert slabs is not None and slabs.num_bytes == 64 * 512 * 9 // 8

"""Products with packed weights without a GPU: the bits of the dense kernel on the expanded weight.

Both run in Triton's interpreter with the same steps along k, so a matrix product has the same
operands and the same bits. Forms are those of the CPU's contract, plus files' own odd ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.matmul import interleave, matmul
from quire.kernels.matmul_configs import TileConfig
from quire.kernels.packed_matmul import PackedTile, packed_matmul, pick_packed
from quire.kernels.slabs import Slabs
from quire.ops.slabs_of import joined, slabs_of
from quire.quant.coded import Coded
from quire.quant.load_forms import load_form
from quire.quant.scaled import Scaled
from quire.quant.weight import Dense, Weight
from tests.native.weights import FORMS, blocks, eight_bits, groups, own_tables, with_zeros

CODED = [name for name in FORMS if name not in ("fp32", "fp16", "bf16") and "inputs" not in name]
TILE = PackedTile(16, 64, 2, 4, 64)


def _slabs(weight: Weight, paired: bool = False) -> Slabs:
    made = slabs_of(weight, paired)
    assert made is not None
    return made


def _dense(x: Tensor, weight: Weight, slabs: Slabs, gate: str | None = None) -> Tensor:
    """The dense kernel's product with the expanded weight, in the packed one's steps."""
    w = weight.dequantize().to(x.dtype)
    if slabs.order is not None:
        w = w[:, slabs.order]
    w = (interleave(w) if gate else w).contiguous()
    config = TileConfig(16, 64, slabs.form.width, 2, 4, swap=True)
    return matmul(x, w, None, None, config, gate=gate)


@pytest.mark.parametrize("form", CODED)
def test_bits_are_the_dense_kernels(form: str) -> None:
    """Red when a weight is not exactly the one that `dequantize` makes, rounded to bf16, or an
    output is summed in another order. Ragged rows and inputs, groups of zeros."""
    torch.manual_seed(3)
    weight = with_zeros(FORMS[form](34, 288))
    slabs, x = _slabs(weight), torch.randn(5, 288).bfloat16()
    assert torch.equal(packed_matmul(x, slabs, tile=TILE), _dense(x, weight, slabs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["4 bits, zeros", "16 values in 32", "e4m3, blocks", "5 bits"])
def test_weights_are_rounded_to_the_inputs_dtype(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    weight = FORMS[form](33, 160)
    slabs, x = _slabs(weight), torch.randn(3, 160).to(dtype)
    assert torch.equal(packed_matmul(x, slabs, tile=TILE), _dense(x, weight, slabs))


@pytest.mark.parametrize(
    "name", ["fp8", "int8", "nf4", "mxfp4", "rtn-int4-g128", "rtn-int4-g128-asym"]
)
def test_forms_made_at_load(name: str) -> None:
    torch.manual_seed(5)
    weight = load_form(name).of(torch.randn(40, 640))
    assert weight is not None
    slabs, x = _slabs(weight), torch.randn(2, 640).bfloat16()
    assert torch.equal(packed_matmul(x, slabs, tile=TILE), _dense(x, weight, slabs))


@pytest.mark.parametrize("rows", [1, 15, 17, 64, 129, 257])
def test_any_number_of_rows(rows: int) -> None:
    """Red when a tile reads or writes outside its rows: everything around them is NaN."""
    torch.manual_seed(rows)
    weight = groups(4, 4, True)(70, 256)
    slabs, block = _slabs(weight), torch.full((rows + 8, 272), float("nan")).half()
    block[:rows, :256] = torch.randint(-4, 5, (rows, 256))  # whole numbers: any order is exact
    x = block[:rows, :256]
    weight = replace(weight, scales=torch.ones_like(weight.scales))
    slabs = _slabs(weight)
    out = torch.full((rows + 3, 75), float("nan")).half()
    packed_matmul(x, slabs, out=out[:rows, :70], tile=pick_packed(rows, 70, 132))
    want = (x.double() @ weight.dequantize().double().T).half()
    assert torch.equal(out[:rows, :70], want)
    assert out[rows:].isnan().all() and out[:, 70:].isnan().all()


@pytest.mark.parametrize("portion", [16, 22, 64])
def test_rows_dealt_out_keep_their_bits(portion: int) -> None:
    torch.manual_seed(6)
    weight = groups(4, 2, False)(70, 128)
    slabs, x, bias = _slabs(weight), torch.randn(4, 128).bfloat16(), torch.randn(70).bfloat16()
    whole = packed_matmul(x, slabs, bias, tile=TILE)
    assert torch.equal(packed_matmul(x, slabs, bias, tile=replace(TILE, portion=portion)), whole)
    config = TileConfig(16, 64, slabs.form.width, 2, 4, swap=True)
    assert torch.equal(whole, matmul(x, weight.dequantize().bfloat16(), bias, config=config))


GATED = {
    "4 bits": groups(4, 4, True),
    "blocks": eight_bits(torch.float8_e4m3fn, (32, 32)),
    "rows": eight_bits(torch.float8_e4m3fn, (1, 0)),
    "tables": own_tables,
}


@pytest.mark.parametrize("form", GATED)
def test_gates_meet_their_ups(form: str) -> None:
    """Red when rows are paired and what stands beside them is not, or the other way round."""
    torch.manual_seed(7)
    weight = GATED[form](96, 128)
    slabs, x = _slabs(weight, paired=True), torch.randn(3, 128).half()
    got = packed_matmul(x, slabs, tile=TILE, gate="silu")
    assert torch.equal(got, _dense(x, weight, slabs, "silu"))


def test_sorted_columns_say_which_inputs_they_are_for() -> None:
    torch.manual_seed(8)
    order = torch.randperm(128)
    weight = replace(groups(4, 2, True)(40, 128), order=order)
    slabs, x = _slabs(weight), torch.randn(3, 128).half()
    got = packed_matmul(x[:, order].contiguous(), slabs, tile=TILE)
    assert torch.equal(got, _dense(x[:, order].contiguous(), weight, slabs))


def test_alike_parts_are_one_weight() -> None:
    parts = [groups(4, 4, False)(n, 128) for n in (64, 32)] + [blocks(6, 32, 32, False)(32, 128)]
    one, other = joined(parts)
    assert isinstance(one, Coded) and one.shape == (96, 128) and other is parts[2]
    assert torch.equal(one.dequantize()[64:], parts[1].dequantize())


BITS = {"rtn-int4-g128": 4.125, "rtn-int4-g32-asym": 4.625, "nf4": 4.5, "mxfp4": 4.25, "fp8": 8.0}


@pytest.mark.parametrize("name", BITS)
def test_no_more_bytes_than_the_format_has(name: str) -> None:
    """Red when something is kept twice, or wider than it needs to be."""
    weight = load_form(name).of(torch.randn(256, 2048).bfloat16().float())
    assert weight is not None
    assert _slabs(weight).num_bytes * 8 <= BITS[name] * 256 * 2048 * 1.03


def test_scales_of_eight_equal_blocks_are_one() -> None:
    scales = (torch.rand(16, 1) + 0.5).half().expand(16, 8).contiguous()
    weight = replace(blocks(2, 32, 1, False)(16, 256), scales=scales)
    slabs = _slabs(weight)
    assert slabs.num_bytes == 16 * (64 + 4)
    x = torch.randn(2, 256).half()
    assert torch.equal(packed_matmul(x, slabs, tile=TILE), _dense(x, weight, slabs))


def test_every_eight_bit_float() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        finite = numbers[numbers.view(dtype).half().isfinite()].view(dtype)
        weight = Scaled(finite.view(torch.uint8)[:, None].repeat(1, 16).view(dtype), *_one(finite))
        x = torch.zeros(1, 16).half()
        x[0, 0] = 1
        got = packed_matmul(x, _slabs(weight), tile=TILE)
        assert torch.equal(got[0].float(), finite.float())


def _one(finite: Tensor) -> tuple[Tensor, tuple[int, int]]:
    return torch.ones(1, 1), (len(finite), 16)


def test_floats_are_no_packed_weight() -> None:
    assert slabs_of(Dense(torch.randn(16, 32))) is None

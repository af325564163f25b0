"""W8A8 experts without a GPU: each token has the bits of dense products with its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul
from quire.kernels.grouped_eight_bit import TILES, multiply_eight_bit
from quire.kernels.grouped_matmul import GroupTile
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.route import combine, sort_pairs
from quire.nn.experts import Experts
from quire.nn.ops import GateForm, Visits
from quire.ops.cuda_ops import CudaOps, gate
from quire.ops.eight_bit_experts import EightBitExperts, expert_bytes
from quire.ops.eight_bit_linear import EightBitLinear
from quire.ops.eight_bit_of import EightBitForm, eight_bit_form, eight_bit_weight
from quire.ops.packed_experts import PackedExperts
from quire.quant.coded import Coded
from quire.quant.load_forms import load_form
from quire.quant.scaled import Scaled
from quire.quant.weight import Weight
from tests.native.weights import eight_bits

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
NUM, OUT, IN = 3, 80, 256
ONE_TILE = EightBitTile(16, 64, 2, 4, 64)
SMALL = GroupTile(16, 64, 128, 2, 4)


def _int8(num_out: int, num_in: int) -> Coded:
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
    return Coded(codes, 8, 32, torch.rand(num_out, 1) * 1e-3, inputs="int8-row", share=num_in // 32)


def _fp8(block: tuple[int, int], inputs: str) -> Callable[[int, int], Scaled]:
    def make(num_out: int, num_in: int) -> Scaled:
        made = eight_bits(E4M3, block)(num_out, num_in)
        scale = 0.03 if inputs == "fp8-one" else None
        return replace(made, inputs=inputs, input_scale=scale)  # type: ignore[arg-type]

    return make


FORMS: dict[str, Callable[[int, int], Coded | Scaled]] = {
    "int8": _int8,
    "fp8": _fp8((1, 0), "fp8-row"),
    "fp8, one": _fp8((0, 0), "fp8-one"),
    "fp8, blocks": _fp8((32, 128), "fp8-128"),  # some lie across two experts
    "fp8, rows of 128": _fp8((1, 128), "fp8-128"),
}


def _form(weight: Weight) -> EightBitForm:
    found = eight_bit_form(weight)
    assert found is not None
    return found


def _rows(x: RoundedRows, rows: Tensor) -> RoundedRows:
    codes = x.codes.view(torch.uint8)[rows].view(x.codes.dtype)
    return RoundedRows(codes, x.scales[rows])


@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_bits_are_the_dense_products(form: str, is_gather: bool, act: str | None) -> None:
    """Red when a row meets another expert's weights, scales or bias, a gate another up, or a sum
    another order."""
    torch.manual_seed(1)
    weight = FORMS[form](NUM * OUT, IN)
    made = expert_bytes(weight, _form(weight), torch.randn(NUM, OUT), NUM, act is not None)
    experts = torch.tensor([[0, 2], [2, 0], [2, 1], [0, 1], [2, 0]], dtype=torch.int32)
    pairs = sort_pairs(experts, NUM, None)
    x = round_inputs(torch.randn(5 if is_gather else 10, IN), made.rounding)

    def product(tile: GroupTile) -> Tensor:
        arguments = (x, made.weight, pairs, made.bias, torch.float16)
        return multiply_eight_bit(*arguments, is_gather=is_gather, gate=act, tile=tile)

    got = product(SMALL)
    assert torch.equal(product(replace(TILES[-1], num_stages=2)), got)
    assert made.bias is not None
    for place, pair in enumerate(pairs.pairs.tolist()):
        number = int(experts.flatten()[pair])
        own = weight.pick(torch.arange(number * OUT, (number + 1) * OUT))
        dense = eight_bit_weight(own, _form(own), act is not None)
        row = _rows(x, torch.tensor([pair // 2 if is_gather else place]))
        want = eight_bit_matmul(row, dense, made.bias[number], torch.float16, ONE_TILE, act)
        assert torch.equal(got[place if is_gather else pair], want[0]), (place, pair)


@pytest.mark.parametrize("form", ["int8", "fp8, blocks"])
def test_who_shares_an_expert_changes_no_bit(form: str) -> None:
    """Red when a tile's height or a neighbour shows in a row's bits."""
    torch.manual_seed(2)
    weight = FORMS[form](NUM * OUT, IN)
    made = expert_bytes(weight, _form(weight), None, NUM, False)
    x = torch.randn(40, IN).bfloat16()
    experts = torch.randint(0, NUM, (40, 1), dtype=torch.int32)

    def product(some: Tensor, tile: GroupTile) -> Tensor:
        pairs = sort_pairs(experts[some].contiguous(), NUM, None)
        rounded = round_inputs(x[some].contiguous(), made.rounding)
        sorted_rows = multiply_eight_bit(
            *(rounded, made.weight, pairs, None, torch.bfloat16), is_gather=True, tile=tile
        )
        out = torch.empty_like(sorted_rows)
        out[pairs.pairs.long()] = sorted_rows
        return out

    every = torch.arange(40)
    whole = product(every, SMALL)
    for tile in TILES:
        assert torch.equal(product(every, replace(tile, num_stages=2)), whole), tile
    for some in (torch.tensor([7]), every[::3], every.flip(0)[:17]):
        assert torch.equal(product(some, SMALL), whole[some])


def _experts(weights: dict[str, list[Weight]], form: GateForm) -> Experts:
    made = Experts(NUM, 128, 96, torch.float16, CPU, form)
    for name, parameter in made.parameters.items():
        for part, weight in zip(parameter.parts, weights[name], strict=True):
            parameter.keep(part, weight)
    return made


def _loaded(num_out: int, num_in: int, count: int, name: str) -> list[Weight]:
    form = load_form(name, on_gpu=True)
    found = [form.of(torch.randn(num_out, num_in) * 0.1) for _ in range(count)]
    return [weight for weight in found if weight is not None]


def _by_loop(x: Tensor, visits: Visits, weights: dict[str, list[Weight]], form: GateForm) -> Tensor:
    """Expert by expert, with the dense kernel."""
    results = []
    for row, experts in zip(x, visits.experts, strict=True):
        for e in experts.tolist():
            up, value = weights["up"][2 * e : 2 * e + 2]
            inner = gate(_dense(up.join(value))(row[None]), form)
            results.append(_dense(weights["down"][e])(inner))
    return combine(torch.cat(results), visits.weights)


def _dense(weight: Weight) -> EightBitLinear:
    form = _form(weight)
    return EightBitLinear(eight_bit_weight(weight, form), form.rounding, None)


@pytest.mark.parametrize("form", [GateForm(), GateForm(alpha=1.7, limit=7.0)])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_experts_of_a_layer(name: str, form: GateForm) -> None:
    """Red when experts in eight bits are not multiplied as dense layers are."""
    torch.manual_seed(3)
    weights = {"up": _loaded(96, 128, 2 * NUM, name), "down": _loaded(128, 96, NUM, name)}
    layer, ops = _experts(weights, form), CudaOps(CPU, torch.float16)
    layer.finish(ops)
    assert isinstance(layer.kernel, EightBitExperts)
    assert set(ops.packed.kept) == {"int8 by int8" if name == "int8" else "e4m3 by e4m3"}
    x = torch.randn(3, 128).half()
    visits = Visits(torch.tensor([[1, 0], [0, 2], [2, 1]], dtype=torch.int32), torch.rand(3, 2))
    loads = torch.zeros(NUM, dtype=torch.int64)
    assert torch.equal(layer(x, visits, loads), _by_loop(x, visits, weights, form))
    assert loads.tolist() == [2, 2, 2]


def test_experts_whose_products_fail_keep_their_inputs() -> None:
    """Red when a device without such products gets them, or nobody is told."""
    torch.manual_seed(4)
    weights = {"up": _loaded(96, 128, 2 * NUM, "fp8"), "down": _loaded(128, 96, NUM, "fp8")}
    layer, ops = _experts(weights, GateForm()), CudaOps(CPU, torch.float16)
    ops.packed.check, ops.packed.check_grouped = lambda *_: None, lambda *_: "other bits"
    with pytest.warns(RuntimeWarning, match="other bits"):
        layer.finish(ops)
    assert isinstance(layer.kernel, PackedExperts)
    assert set(ops.packed.unrounded) == {"e4m3 by e4m3"}


def test_weights_alone_keep_their_inputs() -> None:
    torch.manual_seed(5)
    name = "fp8-weights"
    weights = {"up": _loaded(96, 128, 2 * NUM, name), "down": _loaded(128, 96, NUM, name)}
    layer, ops = _experts(weights, GateForm()), CudaOps(CPU, torch.float16)
    ops.packed.check = lambda *_: None
    layer.finish(ops)
    assert isinstance(layer.kernel, PackedExperts)


def test_static_inputs_have_the_largest_scale_of_all_experts() -> None:
    weight = _fp8((0, 0), "fp8-one")
    parts = [replace(weight(16, 128), input_scale=scale) for scale in (0.01, 0.04, 0.02)]
    joined = parts[0].join(parts[1]).join(parts[2])
    assert _form(joined).rounding == Rounding(E4M3, scale=0.04)

"""Experts with packed weights without a GPU: the bits of the dense grouped product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.engine.gpu_weights import packed_decisions
from quire.kernels.expert_columns import expert_columns
from quire.kernels.grouped_matmul import GroupTile, multiply_gathered, multiply_scattered
from quire.kernels.grouped_packed import multiply_packed
from quire.kernels.route import sort_pairs
from quire.nn.experts import Experts
from quire.nn.ops import Visits
from quire.ops.cuda_ops import CudaOps, GroupedExperts
from quire.ops.packed_experts import PackedExperts
from quire.ops.slabs_of import slabs_of
from quire.quant.load_forms import load_form
from quire.quant.weight import Weight
from tests.native.weights import eight_bits, groups, powers

CPU, NUM, OUT, IN = torch.device("cpu"), 4, 40, 128
FORMS = {
    "int4": groups(4, 4, True),
    "fp8": eight_bits(torch.float8_e4m3fn, (32, 32)),
    "mxfp4": powers,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_gather", [True, False])
def test_bits_are_the_dense_products(form: str, is_gather: bool) -> None:
    """Red when a row meets another expert's weights or scales, or is summed in another order."""
    torch.manual_seed(1)
    weight = FORMS[form](NUM * OUT, IN)
    slabs = slabs_of(weight)
    assert slabs is not None
    experts = torch.tensor([[0, 2], [2, 0], [2, 3], [0, 3], [2, 0]], dtype=torch.int32)
    pairs = sort_pairs(experts, NUM, None)
    x = torch.randn(5 if is_gather else 10, IN).bfloat16()
    bias = torch.randn(NUM, OUT).bfloat16()
    tile = GroupTile(16, 64, slabs.form.width, 2, 4, swap=True)
    dense = weight.dequantize().bfloat16().view(NUM, OUT, IN)
    multiply = multiply_gathered if is_gather else multiply_scattered
    want = multiply(x, dense, pairs, tile, bias)
    assert torch.equal(multiply_packed(x, slabs, pairs, bias, is_gather, tile), want)


def _experts(weights: dict[str, list[Weight]]) -> Experts:
    made = Experts(NUM, 64, 32, torch.float16, CPU)
    for name, parameter in made.parameters.items():
        for part, weight in zip(parameter.parts, weights[name], strict=True):
            parameter.keep(part, weight)
    return made


def _ordered(num_out: int, num_in: int, orders: list[Tensor | None]) -> list[Weight]:
    """Of four bits in groups, columns sorted by their group."""
    return [
        replace(groups(4, 1, True)(num_out, num_in), order=None if o is None else o.clone())
        for o in orders
    ]


@pytest.mark.parametrize("kind", ["one order", "an order each", "an order for some"])
def test_sorted_columns(kind: str) -> None:
    """Red when an expert takes inputs in another one's order, or act-order experts are expanded."""
    torch.manual_seed(3)
    made: dict[str, list[Weight]] = {}
    for name, num_out, num_in, parts in (("up", 32, 64, 2), ("down", 64, 32, 1)):
        one = torch.randperm(num_in)
        orders = [one if kind == "one order" else torch.randperm(num_in) for _ in range(NUM)]
        found = [
            None if kind == "an order for some" and e == 1 else o for e, o in enumerate(orders)
        ]
        made[name] = _ordered(num_out, num_in, [o for o in found for _ in range(parts)])
    ops, layer = CudaOps(CPU, torch.float16), _experts(made)
    ops.packed.check = lambda *_: None
    layer.finish(ops)
    assert isinstance(layer.kernel, PackedExperts) and not ops.packed.refused
    x = torch.randn(3, 64).half()
    visits = Visits(torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32), torch.rand(3, 2))
    got = layer(x, visits, None)
    want = _expected(x, visits, made)
    assert (got.float() - want).norm() < 5e-3 * want.norm()


def test_experts_that_differ_are_expanded_and_said() -> None:
    """Red when experts become floats without a word, or are counted as kept packed."""
    torch.manual_seed(4)
    orders: list[Tensor | None] = [torch.randperm(64) for _ in range(2 * NUM)]
    made = {"up": _ordered(32, 64, orders), "down": _rounded(64, 32, NUM, "mxfp4")}
    ops, layer = CudaOps(CPU, torch.float16), _experts(made)
    ops.packed.check = lambda *_: None
    with pytest.warns(RuntimeWarning, match="int4 g32 of experts are expanded.*order"):
        layer.finish(ops)
    assert isinstance(layer.kernel, GroupedExperts)
    assert set(ops.packed.kept) == {"float16"}
    assert packed_decisions(ops)[1].value == "int4 g32 of experts"
    x = torch.randn(2, 64).half()
    visits = Visits(torch.tensor([[1, 3], [0, 2]], dtype=torch.int32), torch.rand(2, 2))
    got = layer(x, visits, None)
    want = _expected(x, visits, made)
    assert (got.float() - want).norm() < 5e-3 * want.norm()


def test_columns_of_experts_elsewhere_are_not_read() -> None:
    """Red when a pair of no expert here is looked for in orders that are not there."""
    experts = torch.tensor([[0, 2], [5, 1]], dtype=torch.int32)  # of 5 nobody knows
    pairs = sort_pairs(experts, 3, None)
    pairs.pairs[3] = 1 << 20
    orders = torch.stack([torch.randperm(24) for _ in range(3)]).int()
    x = torch.randn(2, 24)
    got = expert_columns(x, orders, pairs, is_gather=True)
    for pair, expert in ((0, 0), (1, 2), (3, 1)):
        assert torch.equal(got[pair], x[pair // 2][orders[expert].long()])


def _rounded(num_out: int, num_in: int, count: int, name: str) -> list[Weight]:
    weights = [load_form(name).of(torch.randn(num_out, num_in) * 0.1) for _ in range(count)]
    assert all(weights)
    return [weight for weight in weights if weight is not None]


@pytest.mark.parametrize("fails", [False, True])
def test_experts_of_a_layer(fails: bool) -> None:
    """Red when gates and ups change places, or experts whose kernel fails are not expanded."""
    torch.manual_seed(2)
    weights = {"up": _rounded(32, 64, 2 * NUM, "mxfp4"), "down": _rounded(64, 32, NUM, "mxfp4")}
    ops = CudaOps(CPU, torch.float16)
    ops.packed.check = lambda *_: "other bits" if fails else None
    layer = _experts(weights)
    if fails:
        with pytest.warns(RuntimeWarning, match="other bits"):
            layer.finish(ops)
    else:
        layer.finish(ops)
    assert isinstance(layer.kernel, GroupedExperts if fails else PackedExperts)
    x = torch.randn(3, 64).half()
    visits = Visits(torch.tensor([[1, 3], [0, 1], [3, 2]], dtype=torch.int32), torch.rand(3, 2))
    got = layer(x, visits, None)
    torch.testing.assert_close(got.float(), _expected(x, visits, weights), rtol=2e-2, atol=2e-3)


def _expected(x: Tensor, visits: Visits, weights: dict[str, list[Weight]]) -> Tensor:
    up = torch.stack([w.dequantize() for w in weights["up"]]).view(NUM, 2, 32, 64)
    down = torch.stack([w.dequantize() for w in weights["down"]])
    rows = []
    for row, experts, shares in zip(x.float(), visits.experts, visits.weights, strict=True):
        total = torch.zeros(64)
        for e, share in zip(experts.tolist(), shares, strict=True):
            gate, value = up[e] @ row
            total += share * (down[e] @ (torch.nn.functional.silu(gate) * value))
        rows.append(total)
    return torch.stack(rows)

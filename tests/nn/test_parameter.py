"""Parameters: parts in floats and parts that stay packed, side by side."""

from __future__ import annotations

import torch

from quire.nn.linear import Linear
from quire.nn.parameter import Parameter
from quire.ops.torch_ops import TorchOps
from quire.quant.coded import Coded
from quire.quant.rtn import RtnForm
from quire.quant.weight import Dense

CPU = torch.device("cpu")


def packed(rows: int) -> Coded:
    made = RtnForm.parse("rtn-int4-g32").of(torch.randn(rows, 64))
    assert made is not None
    return made


def test_no_memory_for_floats_that_never_come() -> None:
    """Red when a packed model takes the memory of the one it was made from."""
    parameter = Parameter((1 << 20, 1 << 20), torch.float32, CPU, can_pack=True)  # 4 TiB
    weight = packed(4)
    parameter.keep(None, weight)
    assert parameter.weights() == [weight]


def test_parts_of_both_kinds_keep_their_places() -> None:
    torch.manual_seed(0)
    linear = Linear(64, {"q": 8, "k": 4, "v": 4}, bias=True, dtype=torch.float32, device=CPU)
    floats, codes, bias, x = torch.randn(2, 8, 64), packed(4), torch.randn(16), torch.randn(3, 64)
    assert linear.bias is not None
    linear.weight.put("q", floats[0])
    linear.weight.keep("k", codes)
    linear.weight.put("v", floats[1, :4])
    linear.bias.put(None, bias)
    whole = torch.cat((floats[0], codes.dequantize(), floats[1, :4]))
    linear.finish(TorchOps())
    assert torch.allclose(linear(x), x @ whole.T + bias, rtol=1e-5, atol=1e-5)


def test_reordering_reaches_packed_and_plain_parts() -> None:
    """Red when a permuted head keeps its old rows in one of the two forms."""
    torch.manual_seed(1)
    order = torch.tensor([2, 0, 3, 1])
    parameter = Parameter((8, 64), torch.float32, CPU, {"a": slice(0, 4), "b": slice(4, 8)}, True)
    floats, codes = torch.randn(4, 64), packed(4)
    parameter.put("a", floats)
    parameter.keep("b", codes)
    for part in ("a", "b"):
        parameter.reorder(part, order)
    first, second = parameter.weights()
    assert torch.equal(first.dequantize(), floats[order])
    assert torch.equal(second.dequantize(), codes.dequantize()[order])


def test_forms_cut_rows_and_columns_alike() -> None:
    """Red when a share of a weight takes the scales of another."""
    weight = packed(6)
    for form in (weight, Dense(weight.dequantize())):
        assert torch.equal(form.columns(32, 64).dequantize(), weight.dequantize()[:, 32:])
        assert torch.equal(form.pick(slice(1, 3)).dequantize(), weight.dequantize()[1:3])
        both = form.pick(slice(0, 3)).join(form.pick(slice(3, 6)))
        assert torch.equal(both.dequantize(), weight.dequantize())
    try:
        weight.columns(16, 64)
    except ValueError as error:
        assert "want multiples of 32" in str(error)
    else:
        raise AssertionError("a block was cut in two")

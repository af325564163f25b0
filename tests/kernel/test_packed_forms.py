"""What CudaOps makes of packed weights, in the interpreter: packed, in parts, expanded on failure.

Whole numbers as inputs and powers of two as scales: every order of sums is exact there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire.engine.gpu_weights import packed_decisions
from quire.kernels.expand import Scratch, embed_packed, expand
from quire.kernels.matmul import Layouts, matmul
from quire.kernels.slabs import Slabs
from quire.ops import eight_bit_linear, packed_check
from quire.ops.cuda_ops import CudaOps
from quire.ops.eight_bit_linear import EightBitLinear, difference
from quire.ops.eight_bit_of import eight_bit_form
from quire.ops.int8_inputs import Int8Inputs, round_rows
from quire.ops.matmul_linear import MatmulLinear
from quire.ops.packed_forms import PackedForms, PackedTable
from quire.ops.packed_linear import EXPAND_ROWS, PackedLinear
from quire.ops.slabs_of import joined, slabs_of
from quire.quant.coded import Coded
from quire.quant.load_forms import load_form
from quire.quant.scaled import Scaled
from quire.quant.weight import Dense, Inputs, Weight
from tests.native.weights import FORMS, groups, powers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _ops(why: str | None = None) -> CudaOps:
    ops = CudaOps(DEVICE, torch.float16)
    layouts = Layouts(use_library=False)
    ops.packed = PackedForms(DEVICE, torch.float16, layouts, lambda *_: why)
    return ops


def _whole(num_out: int, num_in: int, bits: int = 4) -> Coded:
    made = groups(bits, 4, bits == 4)(num_out, num_in)
    return replace(made, scales=torch.full_like(made.scales, 2.0**-6))


def _integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape).half()


def _want(x: Tensor, *weights: Weight) -> Tensor:
    w = torch.cat([weight.dequantize() for weight in weights]).double()
    return (x.double() @ w.T).half()


@pytest.mark.parametrize(
    "form", ["4 bits, zeros", "6 bits", "16 values in 8", "e4m3, blocks", "bf16 2:4"]
)
def test_expanded_is_dequantized(form: str) -> None:
    """Red when scratch holds other numbers than the reference, or rows of an embedding differ."""
    torch.manual_seed(1)
    weight = FORMS[form](20, 160)
    slabs = slabs_of(weight)
    assert slabs is not None
    want = weight.dequantize().bfloat16()
    assert torch.equal(expand(slabs, torch.empty(20, 160, dtype=torch.bfloat16)), want)
    ids = torch.tensor([3, 19, 0, 3])
    assert torch.equal(embed_packed(slabs, ids, torch.bfloat16), want[ids])


@pytest.mark.parametrize("high", [129, 140])
def test_the_smallest_powers(high: int) -> None:
    """Red when a scale that is no normal number of fp32 becomes zero, or a weight of bf16 does."""
    torch.manual_seed(1)
    weight = powers(20, 160, 0, high)
    weight.scales[0, :3] = torch.arange(3)
    slabs = slabs_of(weight)
    assert slabs is not None
    want = weight.dequantize().bfloat16()
    assert (want[0, :96] != 0).any() and want[0, :96].abs().max() < 1e-36
    assert torch.equal(expand(slabs, torch.empty(20, 160, dtype=torch.bfloat16)), want)


def test_few_rows_packed_and_many_expanded() -> None:
    torch.manual_seed(2)
    ops, weight, bias = _ops(), _whole(40, 256), _integers(40)
    kernel = ops.linear([weight], bias)
    assert isinstance(kernel, PackedLinear)
    for rows in (1, EXPAND_ROWS - 1, EXPAND_ROWS):
        x = _integers(rows, 256)
        assert torch.equal(kernel(x), _want(x, weight) + bias)
    assert ops.packed.kept == {"int4 g128": kernel.slabs.num_bytes}


def test_scratch_is_shared_and_grows() -> None:
    """Red when every layer takes memory for an expanded weight of its own."""
    ops = _ops()
    weights = [_whole(n, 128) for n in (24, 56, 40)]
    kernels = [ops.linear([weight], None) for weight in weights]
    x = _integers(EXPAND_ROWS, 128)
    for kernel, weight in zip(kernels, weights, strict=True):
        assert isinstance(kernel, PackedLinear) and kernel.scratch is ops.packed.scratch
        assert torch.equal(kernel(x), _want(x, weight))
    assert ops.packed.scratch.view((56, 128)).numel() == 56 * 128


def test_parts_of_different_forms() -> None:
    """Red when a bias or a gate meets another part."""
    torch.manual_seed(3)
    parts: list[Weight] = [_whole(16, 128), _whole(16, 128), _whole(32, 128, 8)]
    ops, x, bias = _ops(), _integers(3, 128), _integers(64)
    assert torch.equal(ops.linear(parts, bias)(x), _want(x, *parts) + bias)
    gated = ops.linear(parts, bias, "silu")(x)
    both = (_want(x, *parts) + bias).float()
    want = torch.nn.functional.silu(both[:, :32]).half().float() * both[:, 32:]
    torch.testing.assert_close(gated.float(), want, rtol=2e-3, atol=1e-3)


def test_sorted_columns_take_permuted_inputs() -> None:
    torch.manual_seed(4)
    weight = replace(_whole(24, 128), order=torch.randperm(128))
    x = _integers(EXPAND_ROWS, 128)
    kernel = _ops().linear([weight], None)
    assert torch.equal(kernel(x), _want(x, weight))
    assert torch.equal(kernel(x[:2]), _want(x[:2], weight))


def test_a_form_that_fails_is_expanded_with_a_warning() -> None:
    """Red when a kernel that does not compile, or gives other bits, keeps the engine from starting
    or is used all the same."""
    ops, weight, x = _ops("products of 16 rows differ"), _whole(24, 256), _integers(3, 256)
    with pytest.warns(RuntimeWarning, match="int4 g128.*products of 16 rows differ"):
        kernel = ops.linear([weight], None)
    assert isinstance(kernel, MatmulLinear)
    assert torch.equal(kernel(x), _want(x, weight))
    assert ops.packed.kept == {"float16": 2 * 24 * 256}


def test_the_check_finds_a_wrong_bit_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, dtype = _whole(24, 128), torch.float16

    def randn(*shape: int, generator: object, device: object) -> Tensor:
        return torch.randint(-3, 4, shape).float()  # any order of sums is exact

    monkeypatch.setattr(packed_check.torch, "randn", randn)
    monkeypatch.setattr(packed_check, "_ROWS", (1, 17))
    assert packed_check.why_not(weight, None, dtype) is None
    assert packed_check.why_not(weight, "silu", dtype) is None
    right = packed_check.packed_matmul
    monkeypatch.setattr(
        packed_check, "packed_matmul", lambda x, s, gate: right(x, s, gate=gate) + (len(x) > 1)
    )
    assert packed_check.why_not(weight, None, dtype) == "products of 17 rows differ"
    monkeypatch.setattr(packed_check, "packed_matmul", lambda *a, **b: 1 // 0)
    assert "ZeroDivisionError" in str(packed_check.why_not(weight, None, dtype))


@pytest.mark.parametrize("form,kernel", [("rtn-int4-g128", "Packed"), ("sparse24", "Sparse")])
def test_the_check_asks_every_streamed_kernel(
    form: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a kernel that the weight's few rows would not take is used unchecked."""
    ways = [SimpleNamespace(in_turns=True), SimpleNamespace(in_turns=False)]
    wrong: list[SimpleNamespace] = []

    class Product:
        def __init__(self, slabs: Slabs, bias: None, gate: str | None) -> None:
            self.slabs, self.gate = slabs, gate

        def ways(self, m: int) -> list[SimpleNamespace]:
            return ways if m <= 32 else ways[1:]

        def __call__(self, x: Tensor, out: Tensor, config: SimpleNamespace) -> None:
            dense = expand(self.slabs, torch.empty(self.slabs.shape, dtype=x.dtype))
            out.copy_(matmul(x, dense, gate=self.gate)).add_(float(config in wrong))

    module = SimpleNamespace(**{f"Stream{kernel}": Product})
    monkeypatch.setitem(sys.modules, f"quire.kernels.stream_{kernel.lower()}", module)
    monkeypatch.setattr(packed_check, "_ROWS", (16, 33))
    weight = load_form(form).of(torch.randn(64, 256))
    assert weight is not None
    assert packed_check.why_not(weight, None, torch.float16, streams=True) is None
    for way, said in zip(ways, (" in turns", ""), strict=True):
        wrong[:] = [way]
        why = packed_check.why_not(weight, None, torch.float16, streams=True)
        assert why == f"products of 16 rows{said} differ"


def test_embedding_and_head_are_one_packed_weight() -> None:
    torch.manual_seed(5)
    ops, weight = _ops(), _whole(48, 128, 8)
    table, head = ops.tied(weight)
    assert isinstance(table, PackedTable) and isinstance(head, PackedLinear)
    assert table.slabs is head.slabs
    ids = torch.tensor([5, 47, 5])
    assert torch.equal(table(ids), weight.dequantize().half()[ids])
    x = _integers(2, 128)
    assert torch.equal(head(x), _want(x, weight))


def test_sorted_embeddings_are_expanded() -> None:
    weight = replace(_whole(48, 128), order=torch.randperm(128))
    ops, rows = _ops(), weight.dequantize().half()[7:8]
    with pytest.warns(RuntimeWarning, match="int4 of embeddings"):
        table, _ = ops.tied(weight)
    assert torch.equal(table(torch.tensor([7])), rows)
    assert torch.equal(ops.table(weight)(torch.tensor([7])), rows)
    _, expanded = packed_decisions(ops)
    assert expanded.value == "int4 of embeddings"


def test_what_no_kernel_takes_is_said() -> None:
    """Red when a packed weight becomes floats without a word."""
    scales = torch.full((16, 4), 2.0**-6)
    weight = Coded(torch.randint(0, 16, (16, 128), dtype=torch.uint8), 4, 32, scales, 0, scales)
    ops, x = _ops(), _integers(2, 128)
    with pytest.warns(RuntimeWarning, match="int4 g32 are expanded"):
        kernel = ops.linear([weight], None)
    assert torch.equal(kernel(x), _want(x, weight))
    assert packed_decisions(ops)[1].value == "int4 g32"


def test_floats_stay_as_they_are() -> None:
    """Red when a dense model is copied, converted or multiplied by another kernel."""
    ops, w = _ops(), torch.randn(32, 64).half()
    kernel = ops.linear([Dense(w)], None)
    assert isinstance(kernel, MatmulLinear) and kernel.product.w.data_ptr() == w.data_ptr()
    assert not ops.packed.kept


def test_scratch_must_be_reserved() -> None:
    with pytest.raises(AssertionError, match="reserved"):
        Scratch().view((1, 1))


def test_decisions_tell_bytes_and_reasons() -> None:
    ops = _ops()
    kernel = ops.linear([_whole(24, 256)], None)
    assert isinstance(kernel, PackedLinear)
    (weights,) = packed_decisions(ops)
    assert weights.value.startswith("int4 g128 ")
    failing = _ops("no such instruction")
    with pytest.warns(RuntimeWarning):
        failing.linear([_whole(24, 256)], None)
    weights, expanded = packed_decisions(failing)
    assert weights.value.startswith("float16 ") and expanded.value == "int4 g128"
    assert "no such instruction" in expanded.why
    assert packed_decisions(_ops()) == []


def _signed(num_out: int, num_in: int) -> Coded:
    codes = torch.randint(0, 256, (num_out, num_in), dtype=torch.uint8)
    scales = (torch.rand(num_out, 1) * 0.01).half()
    return Coded(codes, 8, 32, scales, inputs="int8-row", share=num_in // 32)


def test_signed_bytes_multiply_signed_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when W8A8 rounds inputs otherwise than the CPU does, or a gate is forgotten."""
    monkeypatch.setattr(eight_bit_linear, "_CHECKED_ROWS", (1,))
    torch.manual_seed(6)
    ops, weight, bias = _ops(), _signed(48, 128), torch.randn(48).half()
    x = torch.randn(5, 128).half()
    kernel = ops.linear([weight], bias)
    assert isinstance(kernel, EightBitLinear)
    want = round_rows(x.float()) @ weight.dequantize().T + bias
    torch.testing.assert_close(kernel(x).float(), want, rtol=2e-3, atol=2e-3)
    gated = ops.linear([weight], None, "silu")(x).float()
    both = round_rows(x.float()) @ weight.dequantize().T
    want = torch.nn.functional.silu(both[:, :24]) * both[:, 24:]
    torch.testing.assert_close(gated, want, rtol=1e-2, atol=1e-2)


def test_int8_products_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _signed(24, 128)
    form = eight_bit_form(weight)
    assert form is not None
    monkeypatch.setattr(eight_bit_linear, "_CHECKED_ROWS", (1, 17))
    assert difference(weight, form, torch.float16) is None
    right = EightBitLinear.__call__
    monkeypatch.setattr(EightBitLinear, "__call__", lambda self, x: right(self, x) + (len(x) > 1))
    assert difference(weight, form, torch.float16) == "products of 17 rows differ"
    ops = _ops()
    ops.packed.check_eight_bit = lambda *_: "no such instruction"
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        kernel = ops.linear([weight], None)
    assert isinstance(kernel, Int8Inputs) and isinstance(kernel.kernel, PackedLinear)
    weights, inputs = packed_decisions(ops)
    assert weights.value.startswith("int8 ") and "no such instruction" in inputs.why


@pytest.mark.parametrize("inputs", ["fp8-row", "fp8-one", "fp8-128"])
def test_eight_bit_floats_multiply_their_like(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when inputs stay floats, or are rounded otherwise than the weight says."""
    monkeypatch.setattr(eight_bit_linear, "_CHECKED_ROWS", (1,))
    torch.manual_seed(8)
    group = 128 if inputs == "fp8-128" else 256
    floats = torch.randn(48, 256).to(torch.float8_e4m3fn)
    scales = torch.rand(3 if group == 128 else 48, 256 // group) * 0.1
    scale = 0.01 if inputs == "fp8-one" else None
    weight = Scaled(floats, scales, (48 // len(scales), group), inputs, scale)
    x, bias = torch.randn(5, 256).half(), torch.randn(48).half()
    kernel = _ops().linear([weight], bias)
    assert isinstance(kernel, EightBitLinear)
    parts = x.float().view(5, -1, group)
    steps = parts.abs().amax(-1, keepdim=True) / 448 if scale is None else torch.tensor(scale)
    near = (parts / steps).clamp(-448, 448).to(torch.float8_e4m3fn).float() * steps
    want = near.view(5, 256) @ weight.dequantize().T + bias
    torch.testing.assert_close(kernel(x).float(), want, rtol=5e-3, atol=0.02 * want.abs().max())
    gated = _ops().linear([weight], bias, "silu")(x).float()
    want = torch.nn.functional.silu(want[:, :24]) * want[:, 24:]
    torch.testing.assert_close(gated, want, rtol=1e-2, atol=0.03 * want.abs().max())


def test_what_no_product_takes_keeps_its_inputs() -> None:
    """Red when inputs of a head or of odd groups are rounded, or such a weight is not packed."""
    floats = torch.randn(48, 256).to(torch.float8_e4m3fn)
    grouped = Scaled(floats, torch.rand(48, 8), (1, 32), "fp8-row")
    assert eight_bit_form(grouped) is None
    assert isinstance(_ops().linear([grouped], None), PackedLinear)
    head = Scaled(floats, torch.rand(48, 1), (1, 256), "fp8-row")
    _, kernel = _ops().tied(head)
    assert isinstance(kernel, PackedLinear)


def test_one_product_has_one_scale_for_its_inputs() -> None:
    """Red when parts that were given scales of their own become several products."""
    floats = torch.randn(16, 256).to(torch.float8_e4m3fn)
    parts = [Scaled(floats, torch.rand(16, 1), (1, 256), "fp8-one", s) for s in (0.5, 2.0, 1.0)]
    (whole,) = joined(parts)
    assert isinstance(whole, Scaled) and whole.input_scale == 2.0 and whole.shape == (48, 256)


def test_ternary_weights_round_their_inputs() -> None:
    torch.manual_seed(7)
    codes = torch.randint(0, 3, (24, 128), dtype=torch.uint8)
    scales = torch.full((24, 1), 0.5).half()
    weight = Coded(codes, 2, 32, scales, zero=1, inputs="int8-row", share=4)
    kernel, x = _ops().linear([weight], None), torch.randn(3, 128).half()
    assert isinstance(kernel, Int8Inputs)
    want = round_rows(x).float() @ weight.dequantize().T
    torch.testing.assert_close(kernel(x).float(), want, rtol=2e-3, atol=2e-3)

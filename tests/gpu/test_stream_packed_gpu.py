"""Streamed products of packed weights have the bits of the dense kernel on the expanded weight,
by every kernel that can multiply them.

Inputs have a wide spread of magnitudes, so that two orders of summation do round differently.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.hopper import has_hopper_kernels

if not torch.cuda.is_available() or not has_hopper_kernels(torch.device("cuda")):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from benchmarks.gpu_packed import FORMS
from quire.kernels import stream_packed_configs
from quire.kernels.expand import expand
from quire.kernels.matmul import interleave, matmul
from quire.kernels.rehearsal import rehearsal
from quire.kernels.slabs import Slabs
from quire.kernels.stream_packed import StreamPacked
from quire.kernels.stream_sparse import StreamSparse
from quire.ops.packed_linear import stream, streamed
from quire.ops.slabs_of import moved, slabs_of
from quire.quant.load_forms import load_form
from tests.native.weights import powers

STREAMED = ("int4-g128", "int4-g128-asym", "mxfp4", "Q4_0", "2:4", "int8", "Q8_0", "fp8", "nf4")
WIDE_FORMS = (
    *("Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "int3-g32", "int4-g32-asym"),
    *("int8-g32-asym",),
)
ROWS = (1, 7, 16, 23, 32, 33, 65, 200)
# Outputs, inputs, and whether there is a gate. All but the widest are summed in turns as well.
SHAPES = (
    (512, 1024, False), (1000, 1536, False), (28672, 512, True), (4096, 3072, False),
    (6144, 1024, True), (8 * 131, 512, False),
)  # fmt: skip


def _spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).to(dtype)


def _product(
    slabs: Slabs, bias: Tensor | None = None, gate: str | None = None
) -> StreamPacked | StreamSparse:
    product = streamed(slabs, bias, gate)
    assert product is not None
    return product


def _compare(
    product: StreamPacked | StreamSparse, dense: Tensor, x: Tensor, numbers: tuple[int, ...]
) -> None:
    """Products of some numbers of rows, by all kernels, with the dense kernel's."""
    bias, gate = product.bias, product.gate
    with rehearsal():  # compiles them side by side
        for rows in numbers:
            matmul(x[:rows], dense, bias, gate=gate)
            for config in product.ways(rows):
                stream(product, x[:rows], config=config)
    for rows in numbers:
        want = matmul(x[:rows], dense, bias, gate=gate)
        for config in product.ways(rows):
            assert torch.equal(stream(product, x[:rows], config=config), want), (rows, config)


def _slabs(form: str, n: int, k: int, gated: bool, dtype: torch.dtype) -> tuple[Slabs, Tensor]:
    """With the weight it stands for."""
    weight = FORMS[form](n, k, "cuda") if form in FORMS else load_form(form).of(_spread(n, k))
    assert weight is not None
    slabs = slabs_of(weight, gated, dtype)
    assert slabs is not None and slabs.form.lanes, "the kernel does not take the form"
    dense = weight.dequantize().to(dtype)
    return slabs, interleave(dense) if gated else dense


@pytest.mark.parametrize("form", STREAMED)
@pytest.mark.parametrize("n,k,gated", SHAPES)
def test_bits_are_the_dense_kernels(form: str, n: int, k: int, gated: bool) -> None:
    torch.manual_seed(n)
    slabs, dense = _slabs(form, n, k, gated, torch.bfloat16)
    assert torch.equal(expand(slabs, torch.empty_like(dense)), dense)
    gate = "silu" if gated else None
    x, bias = _spread(ROWS[-1], k), None if gated else _spread(n)
    product = _product(slabs, bias, gate)
    for rows in ROWS:
        assert len(product.ways(rows)) == (2 if rows <= 32 and n < 28672 else 1)
    _compare(product, dense, x, ROWS)


@pytest.mark.parametrize("form", WIDE_FORMS)
@pytest.mark.parametrize("n,k,gated", [(776, 2048, False), (26624, 1024, True), (512, 4096, True)])
def test_forms_that_go_by_fp32(
    form: str, n: int, k: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a plane, a scale above scales, an offset or a zero is another group's."""
    monkeypatch.setattr(stream_packed_configs, "PLANES_STREAM", True)
    torch.manual_seed(n)
    slabs, dense = _slabs(form, n, k, gated, torch.bfloat16)
    assert torch.equal(expand(slabs, torch.empty_like(dense)), dense)
    product = _product(slabs, None, "silu" if gated else None)
    _compare(product, dense, _spread(200, k), (1, 9, 32, 33, 100, 200))


@pytest.mark.parametrize(
    "form",
    ["int4-g128", "rtn-int4-g64", "rtn-int4-g32", "int4-g128-asym", "2:4", "Q8_0", "fp8", "nf4"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_and_half_precision(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    slabs, dense = _slabs(form, 384, 768, False, dtype)
    x, product = _spread(40, 768, dtype=dtype), _product(slabs)
    for rows in (1, 27, 40):
        want = matmul(x[:rows], dense)
        for config in product.ways(rows):
            assert torch.equal(stream(product, x[:rows], config=config), want), (rows, config)


@pytest.mark.parametrize("form", ["int4-g128", "2:4"])
def test_fp32_sums(form: str) -> None:
    torch.manual_seed(2)
    slabs, dense = _slabs(form, 1024, 2048, False, torch.bfloat16)
    x, product = _spread(20, 2048), _product(slabs)
    want = matmul(x, dense, None, torch.empty(20, 1024, device="cuda"))
    for config in product.ways(20):
        out = torch.empty(20, 1024, device="cuda")
        assert torch.equal(stream(product, x, out, config), want), config


@pytest.mark.parametrize("form", ["int4-g128", "2:4", "Q8_0", "nf4"])
@pytest.mark.parametrize("rows", [1, 32])
def test_sums_in_turns_never_miss_a_turn(form: str, rows: int) -> None:
    """Red when a group now and then adds before the other one has handed the sum on."""
    torch.manual_seed(3)
    slabs, dense = _slabs(form, 4096, 14336, False, torch.bfloat16)
    x, product = _spread(rows, 14336), _product(slabs)
    assert product.pick(rows).in_turns
    want = matmul(x, dense)
    wrong = sum((stream(product, x) != want).sum() for _ in range(300))
    assert int(wrong) == 0


@pytest.mark.parametrize("n,k,gated", [(6144, 4096, False), (28672, 4096, True)])
def test_sparse_weights_of_an_8b_model(n: int, k: int, gated: bool) -> None:
    """Red when a program of more rows or longer stages takes others' values or places."""
    torch.manual_seed(4)
    slabs, dense = _slabs("2:4", n, k, gated, torch.bfloat16)
    gate = "silu" if gated else None
    rows = (1, 2, 3, 8, 9, 16, 17, 31, 32, 48, 64, 65, 100, 128, 129, 255, 256)
    _compare(_product(slabs, None, gate), dense, _spread(256, k), rows)


@pytest.mark.parametrize("high", [129, 140])
def test_the_smallest_powers(high: int) -> None:
    """Red when a scale of MXFP4 that is no normal number of bf16 becomes zero."""
    torch.manual_seed(5)
    weight = powers(384, 768, 0, high)
    slabs = slabs_of(moved(weight, torch.device("cuda")), False, torch.bfloat16)
    assert slabs is not None and slabs.form.lanes
    x, dense = _spread(40, 768), weight.dequantize().bfloat16().cuda()
    assert torch.equal(expand(slabs, torch.empty_like(dense)), dense)
    _compare(_product(slabs), dense, x, (1, 40))
    small = powers(384, 768, 0, 3)  # nothing else in the sums, and inputs that let it be seen
    slabs = slabs_of(moved(small, torch.device("cuda")), False, torch.bfloat16)
    assert slabs is not None
    dense = small.dequantize().bfloat16().cuda()
    got = stream(_product(slabs), x * 2.0**100)
    assert (got != 0).any() and torch.equal(got, matmul(x * 2.0**100, dense))


def test_a_view_that_the_copy_engine_cannot_read() -> None:
    slabs, dense = _slabs("int4-g128", 512, 1024, False, torch.bfloat16)
    x = _spread(5, 1025)[:, 1:]
    assert torch.equal(stream(_product(slabs), x), matmul(x, dense))

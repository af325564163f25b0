"""Streamed products of four-bit weights have the bits of the dense kernel on the expanded weight.

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
from quire.kernels.expand import expand
from quire.kernels.matmul import interleave, matmul
from quire.kernels.slabs import Slabs
from quire.kernels.stream_packed import StreamPacked
from quire.ops.packed_linear import stream
from quire.ops.slabs_of import slabs_of
from quire.quant.load_forms import load_form

STREAMED = ("int4-g128", "int4-g128-asym", "mxfp4", "Q4_0")
ROWS = (1, 7, 16, 33, 65, 200)
SHAPES = ((512, 1024), (1000, 1536), (28672, 512), (4096, 3072))


def _spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(shape, device="cuda") * torch.randn(shape, device="cuda").exp()
    return (values * shape[-1] ** -0.5).to(dtype)


def _slabs(form: str, n: int, k: int, gated: bool, dtype: torch.dtype) -> tuple[Slabs, Tensor]:
    """With the weight it stands for."""
    weight = FORMS[form](n, k, "cuda") if form in FORMS else load_form(form).of(_spread(n, k))
    assert weight is not None
    slabs = slabs_of(weight, gated, dtype)
    assert slabs is not None and slabs.form.lanes, "the kernel does not take the form"
    dense = weight.dequantize().to(dtype)
    return slabs, interleave(dense) if gated else dense


@pytest.mark.parametrize("form", STREAMED)
@pytest.mark.parametrize("n,k", SHAPES)
def test_bits_are_the_dense_kernels(form: str, n: int, k: int) -> None:
    torch.manual_seed(n)
    gated = n == 28672
    slabs, dense = _slabs(form, n, k, gated, torch.bfloat16)
    assert torch.equal(expand(slabs, torch.empty_like(dense)), dense)
    gate = "silu" if gated else None
    x, bias = _spread(ROWS[-1], k), None if gated else _spread(n)
    product = StreamPacked(slabs, bias, gate)
    for rows in ROWS:
        want = matmul(x[:rows], dense, bias, gate=gate)
        assert torch.equal(stream(product, x[:rows]), want), f"{rows} rows {product.pick(rows)}"


@pytest.mark.parametrize("form", ["int4-g128", "rtn-int4-g64", "rtn-int4-g32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_and_half_precision(form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    slabs, dense = _slabs(form, 384, 768, False, dtype)
    x, product = _spread(40, 768, dtype=dtype), StreamPacked(slabs, None, None)
    for rows in (1, 40):
        assert torch.equal(stream(product, x[:rows]), matmul(x[:rows], dense)), rows


def test_a_view_that_the_copy_engine_cannot_read() -> None:
    slabs, dense = _slabs("int4-g128", 512, 1024, False, torch.bfloat16)
    x = _spread(5, 1025)[:, 1:]
    assert torch.equal(stream(StreamPacked(slabs, None, None), x), matmul(x, dense))

"""Slabs in the order of a matrix instruction's lanes expand to the weight they were made of."""

from __future__ import annotations

import pytest
import torch

import tests.interpreter  # noqa: F401 (before anything loads triton)
from quire.kernels.expand import embed_packed, expand
from quire.ops.slabs_of import slabs_of
from quire.quant.load_forms import load_form

WIDE = ("int8", "fp8", "nf4")


@pytest.mark.parametrize(
    "form", ["rtn-int4-g128", "rtn-int4-g32", "rtn-int4-g128-asym", "mxfp4", *WIDE]
)
@pytest.mark.parametrize("paired", [False, True])
def test_expanded(form: str, paired: bool) -> None:
    """Red when a byte is stored where `unpack.in_order` does not look for it."""
    torch.manual_seed(0)
    weight = load_form(form).of(torch.randn(64, 512))
    assert weight is not None
    slabs, plain = slabs_of(weight, paired, torch.bfloat16), slabs_of(weight, paired)
    assert slabs is not None and slabs.form.lanes and plain is not None
    out = torch.empty(64, 512, dtype=torch.bfloat16)
    want = expand(plain, torch.empty_like(out))
    assert torch.equal(expand(slabs, out), want)
    assert paired or torch.equal(want, weight.dequantize().bfloat16())
    ids = torch.tensor([5, 0, 63])
    assert torch.equal(embed_packed(slabs, ids, torch.bfloat16), want[ids])

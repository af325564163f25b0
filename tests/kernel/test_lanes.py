"""Slabs in the order of a matrix instruction's lanes expand to the weight they were made of."""

from __future__ import annotations

import pytest
import torch

import tests.interpreter  # noqa: F401 (before anything loads triton)
from benchmarks.gpu_packed import FORMS
from quire.kernels import stream_packed_configs
from quire.kernels.expand import embed_packed, expand
from quire.kernels.stream_packed_configs import words_of
from quire.ops.slabs_of import slabs_of
from quire.quant.load_forms import load_form

WIDE = ("int8", "fp8", "nf4")
PLANES = (
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "IQ4_NL",
    "int3-g32",
    "int4-g32-asym",
    "int8-g32-asym",
)


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


@pytest.mark.parametrize(("form", "paired"), [(form, i % 2 == 0) for i, form in enumerate(PLANES)])
def test_what_lies_beside_codes_in_lanes(
    form: str, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when planes, or numbers beside them, lie where nobody looks; or twice."""
    monkeypatch.setattr(stream_packed_configs, "PLANES_STREAM", True)
    torch.manual_seed(0)
    weight = FORMS[form](64, 1024, "cpu")
    slabs, plain = slabs_of(weight, paired, torch.bfloat16), slabs_of(weight, paired)
    assert slabs is not None and slabs.form.lanes and plain is not None
    assert slabs.num_bytes == plain.num_bytes and len(slabs.words) == words_of(slabs.form, 1024)
    out = torch.empty(64, 1024, dtype=torch.bfloat16)
    assert torch.equal(expand(slabs, out), expand(plain, torch.empty_like(out)))

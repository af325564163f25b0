"""Rounding to nearest: within half a step of every weight, and names that are refused."""

from __future__ import annotations

import pytest
import torch

from quire.errors import NotSupported
from quire.load.wish import Wish
from quire.quant.rtn import RtnForm

NAMES = [f"rtn-int{b}-g{g}{asym}" for b in (4, 8) for g in (32, 64, 256) for asym in ("", "-asym")]


@pytest.mark.parametrize("name", NAMES)
def test_within_half_a_step(name: str) -> None:
    """Red when codes are shifted, scales belong to other groups, or a range is not covered."""
    torch.manual_seed(0)
    form = RtnForm.parse(name)
    weight = torch.randn(10, 512) * torch.rand(10, 512 // 32, 1).repeat(1, 1, 32).view(10, 512)
    weight[3, :256] = 0.0  # a group of zeros
    weight[4, :32] = weight[4, :32].abs() + 1.0  # all on one side
    weight[5, 40] = 30.0  # an outlier
    got = form.of(weight)
    assert got is not None and got.shape == (10, 512)
    groups = weight.view(10, -1, form.group)
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    if form.has_zeros:
        step = (high - low) / (2**form.bits - 1)
    else:
        step = torch.maximum(high, -low) / (2 ** (form.bits - 1) - 0.5)
    step = step + (high - low) * 2**-10  # scales and offsets are fp16
    error = (got.dequantize() - weight).view_as(groups).abs().amax(-1)
    slack = 1.01 if form.has_zeros else 0.51  # the zero is rounded as well
    assert (error <= slack * step + 1e-7).all()
    assert (got.dequantize()[3, :256] == 0.0).all()


def test_inputs_that_no_group_fits() -> None:
    """Red when 576 inputs in groups of 128 end up with a ragged group."""
    weight = torch.randn(4, 576)
    made = RtnForm.parse("rtn-int4-g128").of(weight)
    assert made is not None and made.share == 2 and made.scales.shape == (4, 9)
    assert RtnForm.parse("rtn-int4-g32").of(torch.randn(4, 40)) is None
    assert RtnForm.parse("rtn-int4-g32").of(torch.full((4, 64), torch.inf)) is None


@pytest.mark.parametrize("name", ["int4", "rtn-int3-g32", "rtn-int4-g48", "rtn-int4-g032", "awq"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(NotSupported, match="or rtn-int4-g32 or the like"):
        RtnForm.parse(name)


def test_heads_get_eight_bits_and_routers_none() -> None:
    wish = Wish(form=RtnForm.parse("rtn-int4-g32"))
    bits = [getattr(wish.form_of(name), "bits", None) for name in NAMED]
    assert bits == [8, 8, None, None, 4, 4]


NAMED = (
    "embed.weight",
    "head.weight",
    "layers.0.router.weight",
    "score.weight",
    "layers.0.qkv.weight",
    "layers.1.experts.up",
)

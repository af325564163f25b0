"""Keys are made even before they become codes: attention stays the same, codes lose less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attn.backend import AttentionBackend, HeadTransform
from quire.attn.balance import Balance, balance_of
from quire.attn.cpu import CpuAttention
from quire.attn.native import NativeAttention
from quire.attn.reference import ReferenceAttention
from tests.coded_case import coded_cache
from tests.paged_case import make_case

ANGLES = torch.outer(torch.arange(256.0), 1e4 ** -(torch.arange(16.0) / 16))
ROPE = HeadTransform(ANGLES.cos(), ANGLES.sin(), None, None, 0.0)


def biased_case(has_sinks: bool = False):
    """Qwen's kind of keys: large biases in slow dimensions, one dimension that is large itself."""
    case = make_case([150], heads=(4, 2), has_sinks=has_sinks)
    keys = case.qkv[0].view(150, 8, 32)[:, 4:6]
    keys[..., 5] *= 30
    keys[:, 0, 15] += 90
    keys[:, 1, 30] -= 70
    return case, keys


@pytest.mark.parametrize("backend", [ReferenceAttention(), CpuAttention(), NativeAttention()])
# With sinks a bias must stay, and four bits of such keys lose much in any case.
@pytest.mark.parametrize(("form", "has_sinks"), [("int8", False), ("int8", True), ("int4", False)])
def test_codes_of_even_keys_lose_less(
    backend: AttentionBackend, has_sinks: bool, form: str
) -> None:
    """Red when queries are not multiplied by what keys are divided by, or sinks see a shift."""
    case, keys = biased_case(has_sinks)
    want = case.expected([150], [150], ROPE)
    even = replace(ROPE, balance=balance_of(keys, ROPE, may_shift=not has_sinks))
    errors = []
    for transform in (ROPE, even):
        got = case.step(backend, coded_cache(case, form), [150], [150], transform=transform)
        errors.append((got.double() - want).square().mean())
    assert errors[1] < 0.6 * errors[0]


def test_backends_agree_to_the_last_bit_of_a_code() -> None:
    """Red when native keys are evened out in another order than torch's."""
    case, keys = biased_case()
    even = replace(ROPE, balance=balance_of(keys, ROPE, may_shift=True))
    found = [
        case.step(backend, coded_cache(case, "int8"), [150], [150], transform=even)
        for backend in (ReferenceAttention(), NativeAttention())
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_factors_are_powers_of_two_and_offsets_are_means() -> None:
    torch.manual_seed(0)
    keys = torch.randn(4000, 1, 32) * 3.0
    keys[..., 7] *= 100
    keys[..., 31] += 50
    found = balance_of(keys, ROPE, may_shift=True)
    assert torch.equal(found.factors.log2(), found.factors.log2().round())
    assert found.factors[0, 7] == found.factors[0, 23] == 256  # they turn into each other
    slow = torch.arange(4096.0) * 1e4 ** -(15 / 16)
    assert found.offsets[0, 31].item() == pytest.approx(50 * slow.cos().mean().item(), abs=0.3)
    assert found.offsets[0, 15].item() == pytest.approx(-50 * slow.sin().mean().item(), abs=0.3)
    still = balance_of(keys, ROPE, may_shift=False)
    assert not still.offsets.any() and still.factors[0, 31] >= 32


def test_a_key_and_its_query_meet_again() -> None:
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    balance = Balance(torch.randn(2, 8), 2.0 ** torch.randint(-3, 4, (2, 8)))
    q2, k2 = balance.of(q, k)
    shift = torch.einsum("thd,hd->th", q, balance.offsets.repeat_interleave(2, 0))
    before = torch.einsum("thd,thd->th", q, k.repeat_interleave(2, 1))
    after = torch.einsum("thd,thd->th", q2, k2.repeat_interleave(2, 1))
    torch.testing.assert_close(after, before - shift, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [ReferenceAttention(), NativeAttention()])
def test_rotated_codes_leave_large_dimensions_to_large_queries(backend: AttentionBackend) -> None:
    """Red when a rotation's even errors are multiplied by queries that are large where keys are."""
    case = make_case([150], heads=(4, 2))
    rows = case.qkv[0].view(150, 8, 32)
    rows[:, :6] *= torch.exp2(torch.linspace(-2.5, 1.5, 16)).repeat(2)
    want = case.expected([150], [150], ROPE)
    errors = []
    for queries in (None, rows[:, :4]):
        even = replace(ROPE, balance=balance_of(rows[:, 4:6], ROPE, True, queries))
        got = case.step(backend, coded_cache(case, "int4"), [150], [150], transform=even)
        errors.append((got.double() - want).square().mean())
    assert errors[1] < 0.9 * errors[0]

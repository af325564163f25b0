"""Bits of CPU attention beyond 256 keys, where the library's products take two halves."""

from __future__ import annotations

import itertools

import pytest
import torch

from quire.attn.cpu import CpuAttention
from quire.attn.latent_cpu import LatentCpu
from tests.latent_case import Sizes, make_latent_case
from tests.paged_case import make_case

CASES = {
    "heads of 64": lambda lens: (make_case(lens, heads=(4, 1), head_dim=64), CpuAttention()),
    "heads of 256": lambda lens: (make_case(lens, heads=(4, 2), head_dim=256), CpuAttention()),
    "latents": lambda lens: (make_latent_case(lens, Sizes(8, 128, 64)), LatentCpu()),
}


@pytest.mark.parametrize("length", [400, 600])
@pytest.mark.parametrize("name", CASES)
def test_long_contexts_keep_their_bits(name: str, length: int) -> None:
    """Red when keys are padded so that a step's products split elsewhere than another's."""
    case, backend = CASES[name]([length])
    cache = case.cache(backend)
    whole = case.step(backend, cache, [length], [length])
    ends = list(range(2, length + 1, 9))
    decoded = [case.step(backend, cache, [1], [end]) for end in ends]
    assert torch.equal(torch.cat(decoded), whole[[end - 1 for end in ends]])
    for chunk in (50, 257):
        cuts = [*range(0, length, chunk), length]
        parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole), chunk

"""Draws with drafts follow the target's distribution, and are the draws without them."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from quire.sample.inputs import SampleInputs
from quire.sample.sampler import Sampler
from quire.spec.verify import verified

VOCAB = 64
NUM_DRAWS = 200_000 if os.environ.get("QUIRE_LONG_TESTS") else 6_000
LIMIT = 103.4  # of chi-square with 63 degrees of freedom, which one in a thousand exceeds
TEMPERATURE = 0.8


def draw(sampler: Sampler, logits: torch.Tensor, positions: range) -> list[int]:
    count = len(positions)
    inputs = SampleInputs(
        temperature=torch.full((count,), TEMPERATURE),
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seeds=torch.full((count,), 11),
        positions=torch.tensor(positions),
        all_greedy=False,
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
        num_logprobs=None,
    )
    return sampler(logits.expand(count, -1), inputs).tokens.tolist()


def test_draws_follow_the_distribution() -> None:
    """Red when accepted or refused drafts favour any token: reused noise, a second rule."""
    torch.manual_seed(0)
    logits = torch.randn(VOCAB) * 1.5
    shares = torch.softmax(logits.double() / TEMPERATURE, 0).numpy()
    sampler, rng = Sampler(), random.Random(3)
    plain = draw(sampler, logits, range(NUM_DRAWS))
    likely = np.argsort(-shares)[:6].tolist()
    emitted: list[int] = []
    num_accepted = 0
    while len(emitted) < NUM_DRAWS:
        depth = rng.choice([0, 1, 4])
        start = len(emitted)
        drafts = [rng.choice(likely) for _ in range(depth)]
        kept = verified(draw(sampler, logits, range(start, start + depth + 1)), drafts)
        emitted += kept
        num_accepted += len(kept) - 1
    assert emitted[:NUM_DRAWS] == plain
    assert num_accepted > NUM_DRAWS / 50
    counts = np.bincount(emitted[:NUM_DRAWS], minlength=VOCAB)
    expected = shares * NUM_DRAWS
    assert ((counts - expected) ** 2 / expected).sum() < LIMIT

"""Truncation: the survivors are exactly those of the definition, and draws keep their odds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.sample.sampler import Sampler
from quire.sample.truncate import Limits, distances, keep_mask, kept_tokens
from tests.sample.cases import Row, chi_square, exact_probabilities, make_inputs

MODES = [
    Row(0.8),
    Row(0.8, top_k=5),
    Row(1.2, top_p=0.7),
    Row(1.0, min_p=0.1),
    Row(1.0, top_k=20, top_p=0.8),
    Row(1.5, top_k=30, top_p=0.9, min_p=0.05),
    Row(1.0, top_k=1),
    Row(1.0, top_p=1e-6),
    Row(1.0, min_p=1.0),
]


def _kept(logits: torch.Tensor, row: Row) -> list[int]:
    distance = distances(logits[None], torch.tensor([row.temperature]))[0].numpy()
    limits = Limits.of(row.top_k, float(np.float32(row.top_p)), row.min_p, len(logits))
    return kept_tokens(distance, limits).tolist()


def _by_definition(logits: torch.Tensor, row: Row) -> list[int]:
    """Python lists and f64, one token at a time."""
    distance = distances(logits[None], torch.tensor([row.temperature]))[0].tolist()
    order = sorted((d, token) for token, d in enumerate(distance) if d < float("inf"))
    if row.min_p > 0:
        order = [(d, t) for d, t in order if d <= float(np.float32(-np.log(row.min_p)))]
    if row.top_k > 0:
        order = order[: row.top_k]
    weights = [float(np.exp(np.float32(-d))) for d, _ in order]
    target, mass, kept = float(np.float32(row.top_p)) * sum(weights), 0.0, []
    for (_, token), weight in zip(order, weights, strict=True):
        if row.top_p < 1 and mass >= target:
            break
        kept.append(token)
        mass += weight
    return sorted(kept)


@pytest.mark.parametrize("row", MODES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "banned", "peaked"])
def test_survivors(row: Row, kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for vocab_size in (50, 501, 3000):
        logits = torch.randn(vocab_size, generator=generator) * 3
        if kind == "ties":
            logits = logits.round()
        elif kind == "flat":
            logits = logits * 0
        elif kind == "banned":
            logits[torch.rand(vocab_size, generator=generator) < 0.97] = -torch.inf
            logits[7] = 0.0
        elif kind == "peaked":
            logits[11] = 30.0
        want = _by_definition(logits, row)
        mask = keep_mask(logits[None], make_inputs([row]))[0]
        assert mask.nonzero().squeeze(1).tolist() == want
        if row != MODES[0]:
            assert _kept(logits, row) == want


def test_exact_fractions_keep_the_crossing_token() -> None:
    """Four equal tokens: half the mass is two of them, a hair more is three, lowest ids first."""
    logits = torch.zeros(4)
    assert _kept(logits, Row(top_p=0.5)) == [0, 1]
    assert _kept(logits, Row(top_p=0.5000001)) == [0, 1, 2]
    assert _kept(logits, Row(top_k=3)) == [0, 1, 2]
    assert _kept(logits, Row(min_p=1.0)) == [0, 1, 2, 3]


def test_top_p_counts_mass_among_survivors() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert _kept(logits, Row(top_p=0.6)) == [0, 1]
    assert _kept(logits, Row(top_k=2, top_p=0.55)) == [0]  # 0.4 of 0.7 is 0.571


@pytest.mark.parametrize("row", MODES, ids=str)
def test_draws_follow_the_truncated_distribution(row: Row) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    rows = [replace(row, seed=i % 7, position=i) for i in range(6000)]
    draws = Sampler()(logits.expand(len(rows), -1), make_inputs(rows)).tokens.numpy()
    counts = np.bincount(draws, minlength=50)
    assert abs(chi_square(counts, exact_probabilities(logits, row))) < 4.0

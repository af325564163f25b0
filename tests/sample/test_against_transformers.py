"""Survivors and penalties agree with the logits processors of Hugging Face transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sample.inputs import Penalties
from quire.sample.penalties import apply_penalties
from quire.sample.truncate import Limits, distances, kept_tokens
from tests.sample.cases import make_history

process = pytest.importorskip("transformers.generation.logits_process")

VOCAB = 1000


def _logits(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.9, 0), (40, 1.0, 0), (0, 1.0, 0.03), (100, 0.8, 0), (300, 0.95, 0.001), (1, 1.0, 0)],
)
def test_survivors(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(20):
        scores = logits = _logits(seed)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        warpers = [process.TemperatureLogitsWarper(temperature)]
        if min_p > 0:
            warpers.append(process.MinPLogitsWarper(min_p))
        if top_k > 0:
            warpers.append(process.TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(process.TopPLogitsWarper(top_p))
        for warper in warpers:
            scores = warper(ids, scores)
        want = np.flatnonzero(scores[0].numpy() > -np.inf).tolist()
        distance = distances(logits, torch.tensor([temperature]))[0].numpy()
        limits = Limits.of(top_k, float(np.float32(top_p)), min_p, VOCAB)
        assert kept_tokens(distance, limits).tolist() == want


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3])
def test_repetition_penalty(penalty: float) -> None:
    prompt, output = [5, 9, 5, 700], [11, 9, 11]
    logits = _logits(0)
    want = process.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), logits.clone()
    )
    zero = torch.zeros(1)
    penalties = Penalties(torch.tensor([penalty]), zero, zero)
    apply_penalties(logits, make_history([(prompt, output)], width=12, junk=3), penalties)
    torch.testing.assert_close(logits, want)

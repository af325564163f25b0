"""The noise: exact distributions, no memory between positions, seeds or tokens.

Thresholds are in standard deviations and the draws are fixed, so a failure means the hash changed
for the worse, never bad luck.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sample.gumbel import TokenNoise, row_keys
from quire.sample.sampler import Sampler
from tests.sample.cases import chi_square, make_inputs

DRAWS = 12_000
LIMIT = 4.0


def _draw(logits: torch.Tensor, seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    inputs = make_inputs([])
    ones = torch.ones(len(seeds))
    inputs = type(inputs)(
        temperature=ones,
        top_k=torch.zeros(len(seeds), dtype=torch.int64),
        top_p=ones,
        min_p=torch.zeros(len(seeds)),
        seeds=torch.from_numpy(seeds),
        positions=torch.from_numpy(positions),
        all_greedy=False,
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
        num_logprobs=None,
    )
    return Sampler()(logits.expand(len(seeds), -1), inputs).tokens.numpy()


def _logits(vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def _joint(first: np.ndarray, second: np.ndarray, p: np.ndarray) -> float:
    size = len(p)
    counts = np.bincount(first * size + second, minlength=size * size)
    return chi_square(counts, np.outer(p, p).reshape(-1))


@pytest.mark.parametrize("axis", ["positions", "seeds", "both"])
@pytest.mark.parametrize("vocab_size", [2, 50])
def test_draws_follow_the_softmax(axis: str, vocab_size: int) -> None:
    logits = _logits(vocab_size)
    count = np.arange(DRAWS, dtype=np.int64)
    still = np.full(DRAWS, 1234, np.int64)
    seeds = still if axis == "positions" else count
    positions = still if axis == "seeds" else count
    draws = _draw(logits, seeds, positions)
    counts = np.bincount(draws, minlength=vocab_size)
    assert abs(chi_square(counts, logits.softmax(-1).double().numpy())) < LIMIT


@pytest.mark.parametrize("stride", [1, 2, 16, 2**20, 2**40])
def test_neighbours_are_independent(stride: int) -> None:
    """Both along positions of one seed and along seeds at one position."""
    logits = _logits(7)
    p = logits.softmax(-1).double().numpy()
    count = np.arange(DRAWS // 2, dtype=np.int64) * 2 * stride
    still = np.zeros_like(count)
    assert abs(_joint(_draw(logits, still, count), _draw(logits, still, count + stride), p)) < LIMIT
    assert abs(_joint(_draw(logits, count, still), _draw(logits, count + stride, still), p)) < LIMIT


def test_seed_and_position_do_not_trade_places() -> None:
    logits = _logits(7)
    p = logits.softmax(-1).double().numpy()
    count = np.arange(DRAWS // 2, dtype=np.int64)
    assert abs(_joint(_draw(logits, count, count + 1), _draw(logits, count + 1, count), p)) < LIMIT


def test_negative_and_huge_seeds_work() -> None:
    seeds = np.array([-(2**63), -1, 0, 1, 2**63 - 1], np.int64)
    keys = row_keys(seeds, np.zeros(5, np.int64))
    assert len({tuple(key) for key in keys.tolist()}) == 5
    assert (keys[:, 1] % 2 == 1).all()


def test_start_times_are_exponential() -> None:
    noise = TokenNoise(4096)
    keys = row_keys(np.arange(64), np.arange(64))
    times = np.concatenate([np.exp(noise.log_times(key).astype(np.float64)) for key in keys])
    cells = np.floor((1.0 - np.exp(-times)) * 256).astype(np.int64).clip(0, 255)
    assert abs(chi_square(np.bincount(cells, minlength=256), np.full(256, 1 / 256))) < LIMIT


def test_start_times_of_neighbouring_tokens_are_independent() -> None:
    noise = TokenNoise(4096)
    keys = row_keys(np.full(64, 5), np.arange(64))
    rows = [np.exp(-np.exp(noise.log_times(key).astype(np.float64))) for key in keys]
    cells = (np.stack(rows) * 16).astype(np.int64).clip(0, 15)  # uniform on 16 cells
    for shift in (1, 2, 64, 1024):
        pairs = cells[:, :-shift] * 16 + cells[:, shift:]
        counts = np.bincount(pairs.reshape(-1), minlength=256)
        assert abs(chi_square(counts, np.full(256, 1 / 256))) < LIMIT, shift


def test_flat_vocabulary_favours_no_id() -> None:
    """A coarse uniform would tie among its winners and lean to low ids."""
    noise = TokenNoise(60_000)
    keys = row_keys(np.full(4000, 9), np.arange(4000))
    winners = np.array([int(np.argmin(noise.log_times(key))) for key in keys])
    counts = np.bincount(winners // 1000, minlength=60)
    assert abs(chi_square(counts, np.full(60, 1 / 60))) < LIMIT


def test_extreme_words_stay_finite() -> None:
    """Every hash value gives a finite start time: neither u = 0 nor u = 1 can appear."""
    noise = TokenNoise(8)
    times = noise._times
    words = np.array([0, 1, 2, 2**31, 2**32 - 1, 2**32 - 2, 77, 2**24], np.uint32)
    # With key (0, 1) the mixer is a bijection of its input, so all words are fair inputs.
    noise._hashes[:] = words
    assert np.isfinite(noise.log_times(np.array([0, 1], np.uint32))).all()
    assert times is noise._times

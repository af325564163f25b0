"""Builders shared by the sampler's tests: inputs from plain lists, and exact distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields

import numpy as np
import torch
from torch import Tensor

from quire.params import GREEDY_BELOW
from quire.sample.inputs import History, SampleInputs
from quire.sample.truncate import distances, keep_mask


@dataclass(frozen=True, slots=True)
class Row:
    """One row's wishes."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def make_inputs(rows: Sequence[Row], num_logprobs: int | None = None) -> SampleInputs:
    return SampleInputs(
        temperature=torch.tensor([r.temperature for r in rows], dtype=torch.float32),
        top_k=torch.tensor([r.top_k for r in rows], dtype=torch.int64),
        top_p=torch.tensor([r.top_p for r in rows], dtype=torch.float32),
        min_p=torch.tensor([r.min_p for r in rows], dtype=torch.float32),
        seeds=torch.tensor([r.seed for r in rows], dtype=torch.int64),
        positions=torch.tensor([r.position for r in rows], dtype=torch.int64),
        all_greedy=all(r.temperature < GREEDY_BELOW for r in rows),
        any_top_k=any(r.top_k > 0 for r in rows),
        any_top_p=any(r.top_p < 1.0 for r in rows),
        any_min_p=any(r.min_p > 0.0 for r in rows),
        num_logprobs=num_logprobs,
    )


def to_device(inputs: SampleInputs, device: str) -> SampleInputs:
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    return replace_fields(inputs, **{name: getattr(inputs, name).to(device) for name in names})


def make_history(rows: Sequence[tuple[list[int], list[int]]], width: int, junk: int) -> History:
    """Rows of (prompt, output), padded to `width` with `junk`."""
    tokens = torch.full((len(rows), width), junk, dtype=torch.int64)
    for i, (prompt, output) in enumerate(rows):
        tokens[i, : len(prompt) + len(output)] = torch.tensor(prompt + output, dtype=torch.int64)
    prompt_lens = torch.tensor([len(prompt) for prompt, _ in rows])
    return History(tokens, prompt_lens, prompt_lens + torch.tensor([len(o) for _, o in rows]))


def exact_probabilities(logits: Tensor, row: Row) -> np.ndarray:
    """[V] -> [V] f64: the distribution a row's draws should follow."""
    inputs = make_inputs([row])
    distance = distances(logits[None], inputs.temperature)[0].double()
    weight = torch.where(keep_mask(logits[None], inputs)[0], (-distance).exp(), 0.0)
    return (weight / weight.sum()).numpy()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Deviations above the mean of the statistic, roughly normal; cells under 5 are pooled."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "drew a token that was truncated"
    small = (expected < 5) & (expected > 0)
    observed = np.append(counts[expected >= 5], counts[small].sum())
    expected = np.append(expected[expected >= 5], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return 0.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # Wilson-Hilferty: the cube root of a chi-square is close to normal.
    spread = 2.0 / (9.0 * freedom)
    return ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / spread**0.5

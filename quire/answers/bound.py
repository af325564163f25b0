"""The bound on the error of giving a cached answer, learned for each entry from what it was worth.

One prefill says how much the model would rather have said something else than the cached answer:
the *gap*, the largest log-probability by which another token was ahead. Whenever the answer is made
anew all the same, it is compared, and (gap, agreed) is an observation. An answer agrees with chance
(1 - lapse) / (1 + exp(steepness * (gap - limit))). Which limit, steepness and lapse this entry has
is not known, so all on a grid are kept with their weights; the lapse is for questions that are
different in a way no gap shows. The bound is what the worst of them say that have 5 % of the
weight. Without observations it is far above anything one may promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMITS = np.linspace(-4.0, 12.0, 33)  # gaps, in nats, at which half of the answers agree
STEEPNESS = np.array([0.5, 1.0, 2.0, 4.0, 8.0])
LAPSES = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4])
TAIL = 0.05  # weight of the grid that may be worse than the bound
MAX_SEEN = 128  # observations of an entry that are kept, the newest


class Seen(NamedTuple):
    """What an answer made anew said of the cached one."""

    gap: float
    agreed: bool


def error_bound(seen: Sequence[Seen], gap: float) -> float:
    """The chance that the cached answer is wrong, at most, with confidence 1 - TAIL.

    >>> error_bound([], 0.5) > 0.9
    True
    >>> error_bound([Seen(1.0, True)] * 60, 0.5) < 0.05 < error_bound([Seen(1.0, True)] * 60, 9.0)
    True
    """
    weights = _weights(seen[-MAX_SEEN:]).ravel()
    errors = 1.0 - _agreement(np.array([gap]))[0].ravel()
    order = np.argsort(-errors)
    is_heavy = np.cumsum(weights[order]) >= TAIL
    return float(errors[order][int(np.argmax(is_heavy))])


def _agreement(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """[gaps, limits, steepness, lapses]: the chance of agreement, by every point of the grid."""
    power = STEEPNESS * (gaps[:, None, None] - LIMITS[:, None])  # [gaps, limits, steepness]
    chance = 1.0 / (1.0 + np.exp(np.clip(power, -60.0, 60.0)))
    return np.asarray(chance[..., None] * (1.0 - LAPSES))


def _weights(seen: Sequence[Seen]) -> NDArray[np.float64]:
    """[limits, steepness, lapses], by Bayes' rule from equal weights."""
    chance = np.clip(_agreement(np.array([one.gap for one in seen])), 1e-9, 1.0 - 1e-9)
    agreed = np.array([one.agreed for one in seen], bool)[:, None, None, None]
    logs = np.log(np.where(agreed, chance, 1.0 - chance)).sum(axis=0)
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())

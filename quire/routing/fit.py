"""Fitting a `Chance`: logistic regression, then a curve from its scores to chances.

The curve is fitted to scores of examples that the regression had not seen (cross-validation), and
so are the threshold and the limit of the cascade; an example held out by `report.py` is in none of
them. numpy alone; the same file gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.routing.chance import Chance, Curve
from quire.routing.examples import Examples
from quire.routing.features import NAMES

Array = NDArray[np.float64]

FOLDS = 5
PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0)
# Of a hashed word. Scaled to a variance of 1 each, hundreds of them would drown what is counted.
WORD_SCALE = 0.25
MAX_STEPS = 25  # of Newton's method
MIN_STEPS = 200  # examples below which a curve of steps is noise
RARE = 1e-3


class Linear(NamedTuple):
    weights: Array  # [features]
    bias: float

    def __call__(self, rows: Array) -> Array:
        return np.asarray(rows @ self.weights + self.bias)


def fit(examples: Examples, wanted_share: float) -> Chance:
    """`wanted_share`: of what the large model gains, how much must be kept."""
    mean, scale = examples.rows.mean(axis=0), examples.rows.std(axis=0)
    scale[scale < RARE] = 1.0
    scale[len(NAMES) :] = WORD_SCALE
    rows, labels = (examples.rows - mean) / scale, examples.suffices
    tried = unseen(rows, labels)
    penalty = min(PENALTIES, key=lambda p: log_loss(sigmoid(tried[p]), labels))
    scores = tried[penalty]
    curve = best_curve(scores, labels)
    linear = logistic(rows, labels, penalty)
    chances = curve(scores)
    threshold = pick_threshold(chances, examples, wanted_share)
    return Chance(
        mean=tuple(mean.tolist()),
        scale=tuple(scale.tolist()),
        weights=tuple(linear.weights.tolist()),
        bias=linear.bias,
        curve=curve,
        threshold=threshold,
        mean_logprob=pick_logprob(examples, chances >= threshold, threshold),
    )


# ------------------------------------------------------------ regression


def logistic(
    rows: Array, labels: NDArray[np.bool_], penalty: float, start: Linear | None = None
) -> Linear:
    """By Newton's method, from `start`; the bias is not penalised."""
    wide = np.hstack([rows, np.ones((len(rows), 1))])
    ridge = np.full(wide.shape[1], penalty)
    ridge[-1] = 1e-9
    weights = np.zeros(wide.shape[1])
    if start is not None:
        weights[:-1], weights[-1] = start
    for _ in range(MAX_STEPS):
        chances = sigmoid(wide @ weights)
        gradient = wide.T @ (chances - labels) + ridge * weights
        spread = np.maximum(chances * (1.0 - chances), 1e-6)
        curvature = (wide.T * spread) @ wide + np.diag(ridge)
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-7:
            break
    return Linear(weights[:-1], float(weights[-1]))


def unseen(rows: Array, labels: NDArray[np.bool_]) -> dict[float, Array]:
    """By penalty, [examples]: each one's score by a regression that was not shown it."""
    fold_of = np.arange(len(rows)) % FOLDS
    scores = {penalty: np.empty(len(rows)) for penalty in PENALTIES}
    for fold in range(FOLDS):
        inside = fold_of != fold
        found: Linear | None = None
        for penalty in PENALTIES:  # each is near the one before
            found = logistic(rows[inside], labels[inside], penalty, found)
            scores[penalty][~inside] = found(rows[~inside])
    return scores


def sigmoid(scores: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-np.clip(scores, -60.0, 60.0))))


def log_loss(chances: Array, labels: NDArray[np.bool_]) -> float:
    right = np.where(labels, chances, 1.0 - chances)
    return float(-np.log(np.clip(right, 1e-6, 1.0)).mean())


# ------------------------------------------------------------ calibration


def best_curve(scores: Array, labels: NDArray[np.bool_]) -> Curve:
    """The one of two kinds that tells unseen halves better; a sigmoid where examples are few."""
    if len(scores) < MIN_STEPS:
        return platt(scores, labels)
    halves = [np.arange(len(scores)) % 2 == side for side in (0, 1)]

    def loss(make: Callable[[Array, NDArray[np.bool_]], Curve]) -> float:
        return sum(log_loss(make(scores[a], labels[a])(scores[~a]), labels[~a]) for a in halves)

    make = isotonic if loss(isotonic) < loss(platt) else platt
    return make(scores, labels)


def platt(scores: Array, labels: NDArray[np.bool_]) -> Curve:
    """A sigmoid of the score."""
    found = logistic(scores[:, None], labels, penalty=1e-3)
    return Curve("platt", (float(found.weights[0]), found.bias))


def isotonic(scores: Array, labels: NDArray[np.bool_]) -> Curve:
    """The best curve that never falls, by pooling neighbours that would; linear in between.

    >>> isotonic(np.array([0.0, 1.0, 2.0, 3.0]), np.array([False, True, False, True])).chances
    (0.0, 0.5, 1.0)
    """
    order = np.argsort(scores, kind="stable")
    pools: list[list[float]] = []  # [labels, examples, scores]
    for at in order:
        pools.append([float(labels[at]), 1.0, float(scores[at])])
        while len(pools) > 1 and _mean(pools[-2]) >= _mean(pools[-1]):
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    centres = tuple(pool[2] / pool[1] for pool in pools)
    return Curve("isotonic", centres, tuple(map(_mean, pools)))


def _mean(pool: Sequence[float]) -> float:
    return pool[0] / pool[1]


# ------------------------------------------------------------ limits


def pick_threshold(chances: Array, examples: Examples, wanted_share: float) -> float:
    """The lowest threshold that keeps so much of what the large model gains."""
    gain = float((examples.large - examples.small).sum())
    if gain <= 0.0:
        return 0.0
    limits = np.unique(np.round(np.concatenate([[0.0], chances, [1.0]]), 4))
    for limit in limits:
        to_large = chances < limit
        if (examples.large - examples.small)[to_large].sum() >= wanted_share * gain:
            return float(limit)
    return 1.0


def pick_logprob(examples: Examples, is_small: NDArray[np.bool_], threshold: float) -> float | None:
    """Of answers that the small model would give: the mean logprob below which the chance that it
    will do, seen from its logprobs alone, is under the threshold."""
    if examples.logprobs is None or is_small.sum() < MIN_STEPS // 4:
        return None
    logprobs = examples.logprobs[is_small]
    curve = isotonic(logprobs, examples.suffices[is_small])
    found = zip(curve.scores, curve.chances, strict=True)
    good = [at for at, chance in found if chance >= threshold]
    return float(min(good)) if good else None

"""What a route is worth, on examples it was not made from.

Calibration: whether requests that are told 80 % suffice in 80 of 100 cases. Cost and quality: for
each share of requests that goes to the large model, what answers cost and how good they are, beside
tossing a coin. Which examples are held out follows from their text, so a prompt that occurs twice
is on one side.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.routing.chance import Chance
from quire.routing.examples import Examples
from quire.routing.fit import fit, log_loss

Array = NDArray[np.float64]

BINS = 10
SHARES = tuple(at / 10 for at in range(11))


def fit_and_report(examples: Examples, wanted_share: float, cost_ratio: float) -> Chance:
    """A route, with what is known of it in `about`."""
    held = np.array([_is_held(ask.text) for ask in examples.asks])
    if not 0 < held.sum() < len(held):
        held = np.arange(len(held)) % 5 == 0
    learned, judged = (examples.at(np.flatnonzero(side)) for side in (~held, held))
    made = fit(learned, wanted_share)
    about = report(made, judged, cost_ratio) | {"learned_from": len(learned.asks)}
    return replace(made, about=about)


def _is_held(text: str) -> bool:
    return blake2b(text.encode(), digest_size=2).digest()[0] % 5 == 0


def report(chance: Chance, held: Examples, cost_ratio: float) -> dict[str, Any]:
    chances, labels = chance.of_all(held.rows), held.suffices
    base = np.full(len(labels), labels.mean())
    curve = [point(chances, held, share, cost_ratio) for share in SHARES]
    at = float((chances < chance.threshold).mean())
    return {
        "held_out": len(labels),
        "suffices": _round(labels.mean()),
        "auc": _round(auc(chances, labels)),
        "log_loss": _round(log_loss(chances, labels)),
        "log_loss_without": _round(log_loss(base, labels)),
        "brier": _round(((chances - labels) ** 2).mean()),
        "calibration_error": _round(calibration_error(chances, labels)),
        "calibration_noise": _round(calibration_noise(chances)),
        "curve": chance.curve.kind,
        "reliability": reliability(chances, labels),
        "points": curve,
        "gap_recovered": _round(np.mean([one["recovered"] for one in curve])),
        "chosen": {"threshold": _round(chance.threshold)} | point(chances, held, at, cost_ratio),
        "cascade": cascade(chance, chances, held, cost_ratio),
    }


def point(chances: Array, held: Examples, share: float, cost_ratio: float) -> dict[str, float]:
    """Where this share, the least likely to suffice, goes to the large model."""
    to_large = np.zeros(len(chances), bool)
    to_large[np.argsort(chances, kind="stable")[: round(share * len(chances))]] = True
    return _worth(to_large, to_large.astype(float), held, cost_ratio) | {"share": _round(share)}


def _worth(
    is_large: NDArray[np.bool_], num_large: Array, held: Examples, cost_ratio: float
) -> dict[str, float]:
    """Cost 1: all answers by the large model. A cascade pays the small one too."""
    quality = np.where(is_large, held.large, held.small).mean()
    gain = held.large.mean() - held.small.mean()
    pays = (num_large * cost_ratio + (1.0 - is_large)).mean() / cost_ratio
    return {
        "cost": _round(pays),
        "quality": _round(quality),
        "recovered": _round((quality - held.small.mean()) / gain if gain else 0.0),
    }


def cascade(
    chance: Chance, chances: Array, held: Examples, cost_ratio: float
) -> dict[str, float] | None:
    """With the small model's answers given up where their logprobs are low."""
    if chance.mean_logprob is None or held.logprobs is None:
        return None
    by_chance = chances < chance.threshold
    given_up = ~by_chance & (held.logprobs < chance.mean_logprob)
    is_large = by_chance | given_up
    paid = is_large + given_up / cost_ratio  # the small answer was made for nothing
    found = _worth(is_large, paid, held, cost_ratio)
    return found | {
        "mean_logprob": _round(chance.mean_logprob),
        "escalated": _round(given_up.mean()),
        "share": _round(is_large.mean()),
    }


# ------------------------------------------------------------ figures


def auc(chances: Array, labels: NDArray[np.bool_]) -> float:
    """The chance that one that suffices is told more than one that does not; ties count half."""
    good, bad = chances[labels], chances[~labels]
    if not len(good) or not len(bad):
        return 0.5
    wins = (good[:, None] > bad).mean() + 0.5 * (good[:, None] == bad).mean()
    return float(wins)


def reliability(chances: Array, labels: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Bins of equally many: what was told, and what came true."""
    order = np.argsort(chances, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    return [
        {"told": _round(chances[p].mean()), "true": _round(labels[p].mean()), "count": len(p)}
        for p in parts
    ]


def calibration_error(chances: Array, labels: NDArray[np.bool_]) -> float:
    bins = reliability(chances, labels)
    return sum(b["count"] * abs(b["told"] - b["true"]) for b in bins) / len(labels)


def calibration_noise(chances: Array) -> float:
    """The error that perfect chances would show on so few examples."""
    parts = [part for part in np.array_split(np.sort(chances), BINS) if len(part)]
    spread = [np.sqrt(2.0 / np.pi * (p * (1.0 - p)).mean() / len(p)) for p in parts]
    return float(np.average(spread, weights=[len(p) for p in parts]))


def _round(value: float | np.floating[Any]) -> float:
    return round(float(value), 4)


def table(about: dict[str, Any]) -> tuple[list[str], list[list[object]]]:
    columns = ["to the large model", "cost", "quality", "gap recovered", ""]
    points = [("", one) for one in about["points"]]
    points.append((f"threshold {about['chosen']['threshold']:.2f}", about["chosen"]))
    if about["cascade"] is not None:
        name = f"the same, given up below {about['cascade']['mean_logprob']:.2f}"
        points.append((name, about["cascade"]))
    return columns, [_row(name, one) for name, one in points]


def _row(name: str, one: dict[str, float]) -> list[object]:
    share, recovered = f"{one['share']:.0%}", f"{one['recovered']:.0%}"
    return [share, f"{one['cost']:.2f}", f"{one['quality']:.4f}", recovered, name]

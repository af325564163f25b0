"""Chance: how likely it is that the small model's answer suffices, learned from examples.

A logistic regression over `features.py`, whose scores become chances by a curve that was fitted to
examples it had not seen: a sigmoid (Platt) or steps (isotonic). Saved as JSON, numbers and nothing
else. `fit.py` makes one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import BadRequest
from quire.routing.ask import Ask
from quire.routing.features import NAMES, Vector, vector_of

FORMAT = "quire-route-1"


@dataclass(frozen=True, slots=True)
class Curve:
    """Scores -> chances, piecewise linear over logits for `platt`, over scores for `isotonic`."""

    kind: str  # "platt" or "isotonic"
    scores: tuple[float, ...]  # platt: (slope, shift); isotonic: where the chances are
    chances: tuple[float, ...] = ()

    def __call__(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.kind == "platt":
            slope, shift = self.scores
            return np.asarray(1.0 / (1.0 + np.exp(-np.clip(slope * scores + shift, -60.0, 60.0))))
        return np.interp(scores, self.scores, self.chances)


@dataclass(frozen=True, slots=True)
class Chance:
    mean: tuple[float, ...]  # of every feature, over the examples
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    curve: Curve
    threshold: float  # from this chance on the small model answers
    mean_logprob: float | None = None  # of the small model's answer, below which it is given up
    about: dict[str, Any] | None = None  # what it was learned from, and how well

    def of(self, ask: Ask) -> float:
        return float(self.of_all(vector_of(ask)[None])[0])

    def of_all(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """[asks, features] -> [asks]"""
        return self.curve(self.scores(rows))

    def scores(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        scaled = (rows - np.array(self.mean)) / np.array(self.scale)
        return np.asarray(scaled @ np.array(self.weights) + self.bias)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, "features": list(NAMES), **asdict(self)}
        path.write_text(json.dumps(data) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Chance:
        """Raises BadRequest for what `quire route fit` did not write."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise BadRequest(f"{path}: cannot be read as a route ({error})") from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise BadRequest(f"{path}: is no route; `quire route fit` writes one")
        if data.pop("features", None) != list(NAMES):
            raise BadRequest(f"{path}: was made from other features; run `quire route fit` again")
        try:
            made = _decoded(data)
        except (TypeError, ValueError, KeyError) as error:
            raise BadRequest(f"{path}: is not a whole route ({error}); fit it again") from None
        return made


def _decoded(data: dict[str, Any]) -> Chance:
    size = len(vector_of(Ask("")))
    rows: dict[str, Vector] = {}
    for name in ("mean", "scale", "weights"):
        rows[name] = np.array(data[name], np.float64)
        if rows[name].shape != (size,) or not np.isfinite(rows[name]).all():
            raise ValueError(f"{name} wants {size} finite numbers")
    if not (rows["scale"] > 0).all():
        raise ValueError("scale wants numbers above 0")
    curve = data["curve"]
    made = Curve(str(curve["kind"]), *(tuple(map(float, curve[n])) for n in ("scores", "chances")))
    is_whole = len(made.scores) == (2 if made.kind == "platt" else len(made.chances))
    if made.kind not in ("platt", "isotonic") or not made.scores or not is_whole:
        raise ValueError("curve")
    below = data.get("mean_logprob")
    return Chance(
        **{name: tuple(row.tolist()) for name, row in rows.items()},
        bias=float(data["bias"]),
        curve=made,
        threshold=float(data["threshold"]),
        mean_logprob=None if below is None else float(below),
        about=data.get("about"),
    )

"""Means with their standard errors.

Tokens of one sentence are easy or hard together, so errors come from the means of spans of tokens,
not from tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SPAN = 256  # tokens


class Estimate(NamedTuple):
    value: float
    error: float | None  # standard error; None: there is too little to tell


def token_mean(values: Floats) -> Estimate:
    """Of [windows, tokens]."""
    parts = max(1, values.shape[1] // SPAN)
    spans = [part.mean() for window in values for part in np.array_split(window, parts)]
    return Estimate(float(values.mean()), _error(np.asarray(spans)))


def item_mean(values: Floats) -> Estimate:
    """Of items that have nothing to do with each other."""
    return Estimate(float(values.mean()), _error(values))


def _error(values: Floats) -> float | None:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None

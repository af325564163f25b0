"""Judge: what a pass did to each matrix, measured on the weights as they are read back.

The error is relative: of the outputs on rows of calibration inputs where there are some, of the
weights themselves where there are none. Beside it stands whether the range of the weights is still
the same, how far the largest input is above the mean, and which experts saw too few tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from quire.compress.seen import FEW_TOKENS, Seen

WORST = 4.0  # times the median error: worth naming
RANGE = (0.5, 1.5)  # of the largest weight, after to before: what a grid may do to it
OUTLIERS = 100.0  # the largest input in mean inputs


@dataclass(frozen=True, slots=True)
class Verdict:
    error: float  # relative, squared
    range: float  # the largest weight after, in units of the largest before
    outliers: float | None = None  # the largest input in units of the mean one
    tokens: int | None = None  # that were seen
    zeros: float = 0.0  # share of weights that are 0 after


def judge(weight: Tensor, near: Tensor, seen: Seen | None) -> Verdict:
    """[out, in] before and after."""
    moved = near - weight
    rows = None if seen is None else seen.rows
    if rows is not None and len(rows):
        cost, whole = (rows @ moved.t()).square().sum(), (rows @ weight.t()).square().sum()
    else:
        cost, whole = moved.square().sum(), weight.square().sum()
    most = weight.abs().max().clamp(min=1e-30)
    outliers = tokens = None
    if seen is not None:
        tokens = seen.num_tokens
        if tokens:
            outliers = (seen.most.max() / seen.mean.mean().clamp(min=1e-30)).item()
    error = (cost / whole.clamp(min=1e-30)).item()
    zeros = (near == 0).float().mean().item()
    return Verdict(error, (near.abs().max() / most).item(), outliers, tokens, zeros)


def record(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """For the journal and the report."""
    return {name: asdict(verdict) for name, verdict in verdicts.items()}


def verdicts_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Verdict]:
    return {
        name: Verdict(**fields)
        for one in records
        for name, fields in one.get("verdicts", {}).items()
    }


def spared_of(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Modules that a pass left plain, with what their outputs would have lost."""
    return {name: lost for one in records for name, lost in one.get("spared", {}).items()}


def mean_error(verdicts: Mapping[str, Verdict]) -> float:
    return statistics.fmean(v.error for v in verdicts.values()) if verdicts else 0.0


def share_of_zeros(verdicts: Mapping[str, Verdict], shapes: Mapping[str, tuple[int, int]]) -> float:
    """Among all weights of these projections."""
    sizes = {name: shapes[name][0] * shapes[name][1] for name in verdicts}
    total = sum(sizes.values())
    return sum(v.zeros * sizes[name] for name, v in verdicts.items()) / total if total else 0.0


def remarks(verdicts: Mapping[str, Verdict]) -> list[str]:
    """What a user should know."""
    if not verdicts:
        return ["nothing was changed: every projection is kept"]
    found = []
    median = statistics.median(v.error for v in verdicts.values())
    worst = sorted(verdicts.items(), key=lambda item: -item[1].error)
    loud = [name for name, v in worst if v.error > max(WORST * median, 1e-6)]
    if loud:
        shown = ", ".join(f"{name} ({verdicts[name].error:.2e})" for name in loud[:4])
        found.append(
            f"{len(loud)} projections lose more than {WORST:g} times the median error"
            f" ({median:.2e}): {shown}; --keep may be worth their bytes"
        )
    off = [name for name, v in verdicts.items() if not RANGE[0] <= v.range <= RANGE[1]]
    if off:
        found.append(f"the range of weights changed in {len(off)} projections: {_some(off)}")
    high = [name for name, v in verdicts.items() if (v.outliers or 0.0) > OUTLIERS]
    if high:
        found.append(
            f"inputs of {len(high)} projections have outliers above {OUTLIERS:g} times their mean:"
            f" {_some(high)}"
        )
    few = {n: v.tokens for n, v in verdicts.items() if (v.tokens or FEW_TOKENS) < FEW_TOKENS}
    few |= {n: 0 for n, v in verdicts.items() if v.tokens == 0}
    if few:
        names = [f"{name} ({tokens})" for name, tokens in few.items()]
        found.append(
            f"{len(few)} projections saw fewer than {FEW_TOKENS} tokens and are as good as not"
            f" calibrated: {_some(names)}; give more calibration text"
        )
    return found


def spared_remarks(spared: Mapping[str, float]) -> list[str]:
    if not spared:
        return []
    worst = sorted(spared, key=lambda name: -spared[name])
    return [
        f"{len(spared)} projections stay as they are, since eight bits cost their outputs too much"
        f" on the calibration text: {_some([f'{name} ({spared[name]:.2e})' for name in worst])}"
    ]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more

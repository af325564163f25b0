"""Figures of a load test: percentiles, rates, failures by kind, and goodput under a promise.

Time to first token and end to end count from the time a request was meant to be sent. A gap is the
time between two pieces of text of one stream. Failed requests are in no percentile and in no
goodput; they are counted by kind beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.bench.serve.client import Outcome
from quire.errors import BadRequest

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
MAX_DETAILS = 3


@dataclass(frozen=True, slots=True)
class Promise:
    """The most each may be for a request to count as good, in ms; None: no matter."""

    ttft: float | None = None
    gap: float | None = None  # the longest of the request
    tpot: float | None = None  # the mean time of an output token after the first
    e2e: float | None = None

    @staticmethod
    def parse(text: str) -> Promise:
        """
        >>> Promise.parse("ttft=200,gap=50")
        Promise(ttft=200.0, gap=50.0, tpot=None, e2e=None)
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            try:
                found[name.strip()] = float(value)
            except ValueError:
                found[name.strip()] = 0.0
        known = ("ttft", "gap", "tpot", "e2e")
        if not all(name in known and value > 0 for name, value in found.items()):
            raise BadRequest(
                f"got --slo {text!r}, want milliseconds such as ttft=200,gap=50 (of"
                f" {', '.join(known)})"
            )
        return Promise(**found)

    def is_kept(self, outcome: Outcome) -> bool:
        times = timings(outcome)
        limits = {"ttft": self.ttft, "gap": self.gap, "tpot": self.tpot, "e2e": self.e2e}
        return all(limit is None or times[name] * 1e3 <= limit for name, limit in limits.items())


def timings(outcome: Outcome) -> dict[str, float]:
    """Seconds; of a request that did not fail."""
    first, last = outcome.token_times[0], outcome.token_times[-1]
    more = max(1, outcome.num_output - 1)
    return {
        "ttft": first - outcome.meant,
        "gap": max(gaps(outcome), default=0.0),
        "tpot": (last - first) / more,
        "e2e": last - outcome.meant,
    }


def gaps(outcome: Outcome) -> list[float]:
    times = outcome.token_times
    return [after - before for before, after in pairwise(times)]


def figures(outcomes: Sequence[Outcome], promise: Promise | None) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if outcome.failure is None]
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    begun = min((outcome.meant for outcome in outcomes), default=0.0)
    seconds = max((outcome.ended for outcome in outcomes), default=0.0) - begun
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    times = [timings(outcome) for outcome in good]
    record: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(failed),
        "failures": dict(Counter(outcome.failure for outcome in failed)),
        "failure_details": _details(failed),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(outcome.num_prompt for outcome in good),
        "output_tokens": sum(outcome.num_output for outcome in good),
        "requests_per_s": round(len(good) * per_second, 3),
        "output_tokens_per_s": round(sum(o.num_output for o in good) * per_second, 2),
        "ttft_ms": spread([one["ttft"] for one in times]),
        "gap_ms": spread([gap for outcome in good for gap in gaps(outcome)]),
        "tpot_ms": spread([one["tpot"] for one in times]),
        "e2e_ms": spread([one["e2e"] for one in times]),
        "client_lag_ms": spread([outcome.sent - outcome.meant for outcome in outcomes]),
    }
    if promise is not None:
        kept = [outcome for outcome in good if promise.is_kept(outcome)]
        record["goodput"] = {
            "share": round(len(kept) / max(1, len(outcomes)), 4),
            "requests_per_s": round(len(kept) * per_second, 3),
            "output_tokens_per_s": round(sum(o.num_output for o in kept) * per_second, 2),
        }
    return record


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Percentiles in ms by nearest rank: the smallest value that `share` do not exceed."""
    if not values:
        return None
    ranked = sorted(values)
    found = {name: ranked[rank(share, len(ranked))] for name, share in SHARES.items()}
    found |= {"max": ranked[-1], "mean": sum(ranked) / len(ranked)}
    return {name: round(value * 1e3, 3) for name, value in found.items()}


def rank(share: float, count: int) -> int:
    """Index of a percentile among `count` ascending values.

    >>> [rank(share, 1000) for share in (0.5, 0.99, 0.999)], rank(0.999, 10)
    ([499, 989, 998], 9)
    """
    thousandths = round(share * 1000)
    return -(-thousandths * count // 1000) - 1


def _details(failed: Sequence[Outcome]) -> dict[str, list[str]]:
    """A few different words of each kind of failure."""
    found: dict[str, list[str]] = {}
    for outcome in failed:
        words = found.setdefault(str(outcome.failure), [])
        if outcome.detail and outcome.detail not in words and len(words) < MAX_DETAILS:
            words.append(outcome.detail)
    return found

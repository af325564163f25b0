"""FirstTokenTimes: how long an upstream takes to a first token, learned from what it took before.

seconds = (tokens to compute) * a + (requests there) * b, fitted by least squares in which old
observations fade. A prior that weighs as much as one observation keeps both numbers sane until
there are some. The score that `choose.py` compares is this, so queues and cache misses are weighed
in one unit.

Servers beside each other are fitted together, and each has a pace beside that. Fitted alone, a busy
one would blame its many requests, seem quick at tokens and be given even more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

TOKEN_S, REQUEST_S = 2e-4, 5e-3  # before anything was seen
KEEPS = 0.97  # of an observation's weight at each later one
TYPICAL_TOKENS, TYPICAL_REQUESTS = 500.0, 4.0
DOUBT = 4.0  # observations that a pace of 1 counts for
ALIKE = 1.3  # paces closer than this are those of like machines: the rest is chance

Rates = tuple[float, float]  # seconds for a token, and for a request


@dataclass(slots=True)
class FirstTokenTimes:
    _tt: float = 0.0
    _tr: float = 0.0
    _rr: float = 0.0
    _ts: float = 0.0
    _rs: float = 0.0
    num_seen: int = 0

    def saw(self, tokens: float, requests: float, seconds: float) -> None:
        """`tokens`: asked of it and not yet computed at the time, this request's own included."""
        self._tt = KEEPS * self._tt + tokens * tokens
        self._tr = KEEPS * self._tr + tokens * requests
        self._rr = KEEPS * self._rr + requests * requests
        self._ts = KEEPS * self._ts + tokens * seconds
        self._rs = KEEPS * self._rs + requests * seconds
        self.num_seen += 1

    @staticmethod
    def of_all(each: Iterable[FirstTokenTimes]) -> FirstTokenTimes:
        """What they saw together."""
        found, *others = each
        return FirstTokenTimes(
            *(
                getattr(found, f.name) + sum(getattr(other, f.name) for other in others)
                for f in fields(found)
            )
        )

    def pace(self, rates: Rates) -> float:
        """What was seen here, in parts of what these rates say; 1 for about as much, and where
        little was seen."""
        a, b = rates
        doubt = DOUBT * (a * TYPICAL_TOKENS + b * TYPICAL_REQUESTS) ** 2
        said = a * a * self._tt + 2 * a * b * self._tr + b * b * self._rr
        pace = (a * self._ts + b * self._rs + doubt) / (said + doubt)
        return 1.0 if 1 / ALIKE < pace < ALIKE else max(pace, 1e-3)

    @property
    def rates(self) -> Rates:
        """Seconds for a token and for a request; never negative, never free."""
        # A little of the prior stays for good: without it, equal observations have no one answer.
        prior = KEEPS**self.num_seen + 1e-3
        tt, rr = self._tt + prior * TYPICAL_TOKENS**2, self._rr + prior * TYPICAL_REQUESTS**2
        ts = self._ts + prior * TYPICAL_TOKENS**2 * TOKEN_S
        rs = self._rs + prior * TYPICAL_REQUESTS**2 * REQUEST_S
        det = tt * rr - self._tr * self._tr
        a = (ts * rr - rs * self._tr) / det
        b = (rs * tt - ts * self._tr) / det
        if a <= 0:
            a, b = 0.0, rs / rr
        elif b <= 0:
            a, b = ts / tt, 0.0
        return max(a, TOKEN_S * 1e-3), max(b, REQUEST_S * 1e-3)

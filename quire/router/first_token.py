"""FirstTokenTimes: how long an upstream takes to a first token, learned from what it took before.

seconds = (tokens to compute) * a + (requests there) * b, fitted by least squares in which old
observations fade. A prior that weighs as much as one observation keeps both numbers sane until
there are some. The score that `choose.py` compares is this, so queues and cache misses are weighed
in one unit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOKEN_S, REQUEST_S = 2e-4, 5e-3  # before anything was seen
KEEPS = 0.97  # of an observation's weight at each later one
TYPICAL_TOKENS, TYPICAL_REQUESTS = 500.0, 4.0


@dataclass(slots=True)
class FirstTokenTimes:
    _tt: float = TYPICAL_TOKENS**2
    _tr: float = 0.0
    _rr: float = TYPICAL_REQUESTS**2
    _ts: float = TYPICAL_TOKENS**2 * TOKEN_S
    _rs: float = TYPICAL_REQUESTS**2 * REQUEST_S
    num_seen: int = field(default=0)

    def saw(self, tokens: float, requests: float, seconds: float) -> None:
        """`tokens`: asked of it and not yet computed at the time, this request's own included."""
        self._tt = KEEPS * self._tt + tokens * tokens
        self._tr = KEEPS * self._tr + tokens * requests
        self._rr = KEEPS * self._rr + requests * requests
        self._ts = KEEPS * self._ts + tokens * seconds
        self._rs = KEEPS * self._rs + requests * seconds
        self.num_seen += 1

    def seconds(self, tokens: float, requests: float) -> float:
        a, b = self.rates
        return tokens * a + requests * b

    @property
    def rates(self) -> tuple[float, float]:
        """Seconds for a token and for a request; never negative, never free."""
        # A little of the prior stays for good: without it, equal observations have no one answer.
        tt, rr = self._tt + TYPICAL_TOKENS**2 * 1e-3, self._rr + TYPICAL_REQUESTS**2 * 1e-3
        ts = self._ts + TYPICAL_TOKENS**2 * 1e-3 * TOKEN_S
        rs = self._rs + TYPICAL_REQUESTS**2 * 1e-3 * REQUEST_S
        det = tt * rr - self._tr * self._tr
        a = (ts * rr - rs * self._tr) / det
        b = (rs * tt - ts * self._tr) / det
        if a <= 0:
            a, b = 0.0, rs / rr
        elif b <= 0:
            a, b = ts / tt, 0.0
        return max(a, TOKEN_S * 1e-3), max(b, REQUEST_S * 1e-3)

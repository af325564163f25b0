"""choose: which upstream answers a request. Policy alone: values in, one upstream out.

`prefix` compares expected seconds: what the upstream has pending, the requests it has open
(`first_token.py`), and what of this prompt it does not hold. Computing counts twice, for the
request itself and for whoever comes after it, and once more where the cache is full: it displaces
as much, which somebody will compute again.

A prefix is therefore followed to a busy upstream, though not for ever. Seconds that requests wait
there and need not have waited elsewhere are added up, and fade; once they would have paid for
computing the prefix elsewhere, that is done. A prefix that many ask for is soon in several caches.
Where the news of a cache is stale, what it holds and drops counts for nothing; where all are, the
least loaded answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.router.first_token import FirstTokenTimes, Rates
from quire.router.settings import Policy
from quire.router.upstream import Upstream

PAYS_BACK = 2.0  # times its price, before a prefix is computed once more: chance is no reason
REMEMBERS = 0.9  # of the seconds waited needlessly, at each later request


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as the router sees it: tokens, and keys of its leading pages."""

    num_tokens: int = 0
    page_tokens: int = 1
    keys: Sequence[bytes] = field(default=())

    def uncached(self, upstream: Upstream, now: float) -> int:
        if upstream.index.is_stale(now):
            return self.num_tokens
        held = upstream.index.num_cached(self.keys, now) * self.page_tokens
        return max(0, self.num_tokens - held)


@dataclass(slots=True)
class Chooser:
    policy: Policy
    clock: Callable[[], float] = time.monotonic
    _turn: int = 0

    def choose(
        self, upstreams: Sequence[Upstream], prompt: Prompt, tried: Sequence[Upstream] = ()
    ) -> Upstream | None:
        """None: nobody is left."""
        able = [one for one in upstreams if one.is_usable() and one not in tried]
        if not able:
            return None
        self._turn += 1
        start = self._turn % len(able)
        able = able[start:] + able[:start]  # of equals, another one each time
        if self.policy == "round-robin":
            return able[0]
        if self.policy == "least-loaded":
            return min(able, key=lambda one: one.num_open)
        return self._soonest(able, prompt, self.clock())

    def _soonest(self, able: Sequence[Upstream], prompt: Prompt, now: float) -> Upstream:
        rates = FirstTokenTimes.of_all(one.times for one in able).rates
        offers = [Offer.of(one, prompt, now, rates) for one in able]
        best = min(offers, key=lambda offer: offer.wait_s + offer.work_s)
        home = best.upstream
        others = [offer for offer in offers if offer is not best]
        if not others:
            return home
        idlest = min(others, key=lambda offer: offer.wait_s)
        gap = best.wait_s - idlest.wait_s  # negative where the prefix is at the idler one
        home.regret_s = max(0.0, REMEMBERS * home.regret_s + gap)
        price = PAYS_BACK * (idlest.work_s - best.work_s)
        if gap <= 0 or home.regret_s < price:
            return home
        home.regret_s -= max(0.0, price)
        return idlest.upstream


class Offer(NamedTuple):
    """What an upstream would take: seconds until it begins, and of computing, for everybody."""

    upstream: Upstream
    wait_s: float
    work_s: float

    @staticmethod
    def of(upstream: Upstream, prompt: Prompt, now: float, rates: Rates) -> Offer:
        """`rates`: what upstreams of its kind take."""
        pace = upstream.times.pace(rates)
        token_s, request_s = (pace * rate for rate in rates)
        wait = upstream.pending_tokens * token_s + (upstream.num_open + 1) * request_s
        displaced = 0.0 if upstream.index.is_stale(now) else upstream.index.displaced
        work = prompt.uncached(upstream, now) * token_s * (2 + displaced)
        return Offer(upstream, wait, work)

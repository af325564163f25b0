"""choose: which upstream answers a request. Policy alone: values in, one upstream out.

`prefix` compares expected seconds to the first token: what the upstream has pending, plus what of
this prompt it does not hold, plus the requests it has open (`first_token.py`). A busy upstream with
the prefix therefore loses to an idle one without it as soon as waiting costs more than computing:
no upstream is pinned. Where the news of a cache is stale, its holdings count for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.router.settings import Policy
from quire.router.upstream import Upstream


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
        now = self.clock()
        return min(able, key=lambda one: self._seconds(one, prompt, now))

    def _seconds(self, upstream: Upstream, prompt: Prompt, now: float) -> float:
        tokens = upstream.pending_tokens + prompt.uncached(upstream, now)
        seconds = upstream.times.seconds(tokens, upstream.num_open + 1)
        return seconds if math.isfinite(seconds) else math.inf

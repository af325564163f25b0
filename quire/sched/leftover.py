"""Leftover: how much of a step the background may have. Those that somebody waits for come first.

Alone, the background has steps of any size where a step can be given up as soon as somebody comes
(`native/urge.py`). It then begins again with half the tokens, so that it gets on however often
people come. Where steps cannot be given up they are kept short. Beside answers that are being
written it has what makes their steps hardly longer: many rows on a GPU, few on a CPU. How long a
step of so many tokens takes is learned from the steps themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection

from quire.config import SchedConfig
from quire.request import Request
from quire.sched.background import has_background
from quire.sched.costs import StepCosts
from quire.sched.queue import WaitingLine

ALONE_S = 0.05  # most of a step that nobody can stop
BESIDE = 1.25  # times as long as without the background
KEPT = 8  # one of so many rows and pages stays free for those who come
LOOK_EVERY = 32  # steps of others, of which one is without the background
SELDOM = 4  # steps of others, of which one takes a token along where there is no time for it
WEIGHT = 1 / 8  # of a new measurement


def headroom(request: Request, num_growing: int, num_pages: int) -> int:
    """Pages that must stay free when a request is admitted: for those that run, and where it is of
    the background, for those who come."""
    kept = num_pages // KEPT
    return kept if request.is_background else min(num_growing, kept)


class Leftover:
    def __init__(self, config: SchedConfig) -> None:
        self.can_stop = False  # whether steps of the background are given up; set by the engine
        self.is_used = False  # from the first request of the background on
        self._most, self._target_s = config.max_num_batched_tokens, config.target_gap_ms / 1e3
        self._alone = self._most
        self._num_beside = 0  # steps beside others, so far
        self._spare = self._most  # of the step being planned
        self._seen: dict[int, tuple[float, float]] = {}  # tokens and seconds, by powers of two

    # ------------------------------------------------------------ of one step

    def turns(
        self, running: Collection[Request], waiting: WaitingLine, waits_for_draws: bool = False
    ) -> list[Request]:
        """Who may be planned in the next step. `waits_for_draws`: nobody whose last token is still
        to be drawn, since the step would only wait for it."""
        found = [request for request in running if not (waits_for_draws and request.num_pending)]
        first = waiting.peek() if len(waiting) else None
        if not has_background(found) and (first is None or not first.is_background):
            return found
        self.is_used = True
        others = [request for request in found if not request.is_background]
        somebody_waits = first is not None and not first.is_background
        if somebody_waits or any(request.num_to_feed > 1 for request in others):
            self._spare = 0
            return others
        allowed = self._beside(len(others)) if others else self._by_itself()
        background = [request for request in found if request.is_background][:allowed]
        self._spare = allowed - len(background)
        return [*others, *background]

    def share(self, request: Request, num_tokens: int) -> int:
        """Of so many tokens, those that a request may feed. One that `turns` named has one."""
        if not request.is_background:
            return num_tokens
        own = 1 if request.is_running else 0
        num_tokens = min(num_tokens, self._spare + own)
        self._spare -= num_tokens - own
        return num_tokens

    def has_row(self, request: Request, num_running: int, most: int) -> bool:
        """Whether a request may take one more row."""
        return num_running < most - (most // KEPT if request.is_background else 0)

    def _by_itself(self) -> int:
        if self.can_stop or not self._seen:
            return self._alone
        return max(1, self._fit(0, max(ALONE_S, self._target_s)))

    def _beside(self, num_others: int) -> int:
        self._num_beside += 1
        is_known = any(place <= num_others.bit_length() for place in self._seen)
        if not is_known or self._num_beside % LOOK_EVERY == 0:
            return 0  # to learn what their steps take without us
        alone = self._costs().seconds(num_others)
        fit = self._fit(num_others, max(BESIDE * alone, self._target_s))
        return fit or int(self._num_beside % SELDOM == 0)  # it gets on, however slowly

    def _fit(self, num_others: int, target_s: float) -> int:
        """The most tokens beside those of others that a step has time for."""
        costs = self._costs()

        def seconds(num_tokens: int) -> float:
            return costs.seconds(num_others + num_tokens)

        return max(0, bisect_right(range(self._most + 1), target_s, key=seconds) - 1)

    # ------------------------------------------------------------ what steps teach

    def _costs(self) -> StepCosts:
        return StepCosts.of((round(tokens), seconds) for tokens, seconds in self._seen.values())

    def learn(self, num_tokens: int, seconds: float, was_given_up: bool) -> None:
        """What became of a step."""
        if was_given_up:
            self._alone = max(1, num_tokens // 2)
            return
        if num_tokens >= self._alone:
            self._alone = min(self._most, self._alone * 5 // 4 + 1)
        place = num_tokens.bit_length()
        tokens, before = self._seen.get(place, (float(num_tokens), seconds))
        mean = before + WEIGHT * (seconds - before)
        self._seen[place] = tokens + WEIGHT * (num_tokens - tokens), mean
        for smaller in range(place):  # which are not slower, whatever was seen long ago
            if smaller in self._seen and self._seen[smaller][1] > mean:
                self._seen[smaller] = self._seen[smaller][0], mean

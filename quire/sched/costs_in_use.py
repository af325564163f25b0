"""CostsInUse: a table of step costs that real steps correct, so that a wrong start heals.

What a step took differs from the table by two factors: the pace of the machine, which changes from
second to second and is the same for all sizes, and an error of the table at this size. Errors are
told from the pace by steps of different sizes that follow closely on each other. What disturbs a
step makes it longer, so shorter times are believed sooner than longer ones. Every correction is a
new `StepCosts`. Nothing here knows a clock.
"""

from __future__ import annotations

from math import exp, log

from quire.sched.costs import StepCosts

PACE = 1 / 8  # share of a new step in the pace
START = 0.2  # steps that the start counts as
WEIGHT = 1 / 32  # the least share of a new step in the error at its size
LONGER, SHORTER = 0.25, 1.0  # logarithm of what one step may say at most
CLOSE = 16  # steps within which two sizes are compared
NEWS = 0.03  # logarithm of a change that makes a new table
CONFIRMED = 6.0  # steps of about a size after which its time is known ...
FORGOTTEN = 2048  # ... for so many steps
FINE = 16  # tokens up to which each size has a time of its own
MIN_STEPS = 16  # to know the pace


class CostsInUse:
    def __init__(self, start: StepCosts) -> None:
        self.start = start = _finer(start)  # as it was measured
        self._now = self._steady = start
        self._told_at = [0, 0]  # the step up to which each of them counts
        self.num_steps = 0
        self._pace = 0.0
        self._errors = [0.0] * len(start.tokens)
        self._seen = [0.0] * len(start.tokens)  # steps of about this size, lately
        self._seen_at = [-FORGOTTEN] * len(start.tokens)
        self._sized_at: dict[int, int] = {}  # the last step of exactly this size
        self._other_at = -CLOSE  # the last step of another size than the one before it
        self._last_size = 0

    @property
    def now(self) -> StepCosts:
        """With the pace of the machine: what a step of a size takes these seconds."""
        if self._told_at[0] != self.num_steps:  # few steps are asked about
            self._now, self._told_at[0] = _news(self._now, self._table(self._pace)), self.num_steps
        return self._now

    @property
    def steady(self) -> StepCosts:
        """Without: what sizes take beside each other."""
        if self._told_at[1] != self.num_steps:
            self._steady, self._told_at[1] = _news(self._steady, self._table(0.0)), self.num_steps
        return self._steady

    def learn(self, num_tokens: int, seconds: float) -> None:
        """What a step took."""
        expected = self.start.seconds(num_tokens)
        if seconds <= 0.0 or expected <= 0.0:
            return
        self.num_steps += 1
        shares = self.start.shares(num_tokens)
        error = sum(self._errors[at] * share for at, share in shares)
        surprise = log(seconds / expected) - self._pace - error
        if self._is_compared(num_tokens):
            self._correct(shares, surprise)
        self._pace += PACE * _bounded(surprise)
        self._sized_at[num_tokens] = self.num_steps
        for at, share in shares:
            self._seen[at] = share + (self._seen[at] if self._is_fresh(at) else 0.0)
            self._seen_at[at] = self.num_steps

    def is_known(self, num_tokens: int) -> bool:
        """Whether a step of this size has been seen lately."""
        seen_at = self._sized_at.get(num_tokens)
        return seen_at is not None and self.num_steps - seen_at < FORGOTTEN

    def hopeful(self, below: int) -> StepCosts:
        """The steady table, in which sizes up to `below` that were not seen lately take no longer
        than smaller ones: as short as they may turn out to be."""
        tokens, times = self.steady.tokens, list(self.steady.times)
        for at in range(1, len(times)):
            if tokens[at] <= below and not self._is_confirmed(at):
                times[at] = times[at - 1]
        return StepCosts(tokens, tuple(times))

    # ------------------------------------------------------------ of one step

    def _is_compared(self, num_tokens: int) -> bool:
        """Whether the pace was learned from other sizes too. Where it was not, it may have changed
        since, and that must not be taken for an error of the table."""
        if num_tokens != self._last_size:
            if self._last_size:
                self._other_at = self.num_steps
            self._last_size = num_tokens
        return self.num_steps > MIN_STEPS and self.num_steps - self._other_at < CLOSE

    def _correct(self, shares: tuple[tuple[int, float], ...], surprise: float) -> None:
        total = sum(share * share for _, share in shares)
        for at, share in shares:
            seen = self._seen[at] if self._is_fresh(at) else 0.0
            weight = max(WEIGHT, 1 / (1 + START + seen))
            self._errors[at] += share / total * weight * _bounded(surprise)

    def _is_fresh(self, at: int) -> bool:
        return self.num_steps - self._seen_at[at] < FORGOTTEN

    def _is_confirmed(self, at: int) -> bool:
        return self._seen[at] >= CONFIRMED and self._is_fresh(at)

    def _table(self, pace: float) -> StepCosts:
        start = self.start
        times = (
            time * exp(pace + error) for time, error in zip(start.times, self._errors, strict=True)
        )
        return StepCosts.of(zip(start.tokens, times, strict=True))


def _finer(costs: StepCosts) -> StepCosts:
    """With all small sizes, which are what one request feeds and differ most from each other."""
    sizes = sorted({*costs.tokens, *range(costs.tokens[0], min(FINE, costs.tokens[-1]))})
    return StepCosts(tuple(sizes), tuple(map(costs.seconds, sizes)))


def _bounded(surprise: float) -> float:
    return max(-SHORTER, min(surprise, LONGER))


def _news(old: StepCosts, new: StepCosts) -> StepCosts:
    """The old value while little has changed, for those who keep what follows from it."""
    most = 1 + NEWS
    is_near = all(
        b <= most * a and a <= most * b for a, b in zip(old.times, new.times, strict=True)
    )
    return old if is_near else new

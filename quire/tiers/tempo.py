"""Tempo: whether loading pages or computing them anew is faster, from what was measured here.

Both sides are seconds for a number of tokens: bytes by the rates at which the disk was read and the
device filled, tokens by the rate at which steps with prompts computed. A device that runs behind
the engine's thread is measured before it serves (`runner/chunk_times.py`), since how long that
thread was busy says nothing. Until both sides are known, pages are loaded. A disk is known for
reads up to the size of what was read from it: a few pages say more of how long it takes to begin.
"""

from __future__ import annotations

from quire.sched.costs import StepCosts

NEWEST = 0.3  # share of the newest measurement in an average
START_S = 0.001  # of a read, however small: another thread has to wake up
SURE_BYTES = 64 << 20  # read from a disk: its rate for reads of any size
MIN_TOKENS = 16  # a step of fewer says little about prompts


class Tempo:
    def __init__(self, costs: StepCosts | None = None) -> None:
        """`costs`: what steps take, where that was measured."""
        self.costs = costs
        self.seconds_per_byte = 0.0  # of the disk; 0: not measured
        self.num_read = 0  # bytes, since start
        self.seconds_per_lifted = 0.0  # of a byte that goes to the device; likewise
        self.seconds_per_token = 0.0

    def read(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self.num_read += num_bytes
            self.seconds_per_byte = _blend(self.seconds_per_byte, seconds / num_bytes)

    def lifted(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self.seconds_per_lifted = _blend(self.seconds_per_lifted, seconds / num_bytes)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= MIN_TOKENS:
            self.seconds_per_token = _blend(self.seconds_per_token, seconds / num_tokens)

    def is_worth(self, num_tokens: int, num_read: int, num_lifted: int = 0) -> bool:
        """Whether so many tokens are sooner there when so many bytes of pages are read from the
        disk, and so many brought to the device."""
        computing = self._computing(num_tokens)
        if not computing or self.num_read < min(num_read, SURE_BYTES):
            return True
        loading = num_read * self.seconds_per_byte + num_lifted * self.seconds_per_lifted
        return START_S + loading < computing

    def _computing(self, num_tokens: int) -> float:
        """Seconds; 0: not known."""
        if self.costs is not None:
            return self.costs.seconds(num_tokens)
        return num_tokens * self.seconds_per_token


def _blend(before: float, now: float) -> float:
    return now if before == 0.0 else (1 - NEWEST) * before + NEWEST * now

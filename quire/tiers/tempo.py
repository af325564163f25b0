"""Tempo: whether loading pages or computing them anew is faster, from what was measured here.

Both sides are seconds for a number of tokens: bytes by the rate at which the disk was read, tokens
by the rate at which steps with prompts computed. Until both are known, pages are loaded.
"""

from __future__ import annotations

NEWEST = 0.3  # share of the newest measurement in an average
START_S = 0.001  # of a read, however small: another thread has to wake up
MIN_TOKENS = 16  # a step of fewer says little about prompts


class Tempo:
    def __init__(self) -> None:
        self.seconds_per_byte = 0.0  # 0: not measured
        self.seconds_per_token = 0.0

    def read(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:
            self.seconds_per_byte = _blend(self.seconds_per_byte, seconds / num_bytes)

    def stepped(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= MIN_TOKENS:
            self.seconds_per_token = _blend(self.seconds_per_token, seconds / num_tokens)

    def is_worth(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether so many tokens are sooner there when their pages are read."""
        if not self.seconds_per_byte or not self.seconds_per_token:
            return True
        reading = START_S + num_bytes * self.seconds_per_byte
        return reading < num_tokens * self.seconds_per_token


def _blend(before: float, now: float) -> float:
    return now if before == 0.0 else (1 - NEWEST) * before + NEWEST * now

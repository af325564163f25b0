"""The batch window: newcomers wait a little for company, so that they share their first step."""

from __future__ import annotations

from quire.config import SchedConfig
from quire.sched.queue import WaitingLine


def has_company(config: SchedConfig, waiting: WaitingLine) -> bool:
    """Enough waits to close the window early."""
    return 0 < config.batch_wait_tokens <= waiting.num_tokens


def seconds_held(config: SchedConfig, waiting: WaitingLine, now: float) -> float:
    """How long the window stays open, by the oldest arrival; 0 when there is none.

    The background, which may have waited for hours, neither closes nor opens it."""
    oldest = waiting.oldest_arrival() if config.batch_wait_ms > 0 else None
    return 0.0 if oldest is None else max(0.0, config.batch_wait_ms / 1000 - (now - oldest))

"""LateFirstTokens: which share of first tokens came too late since the last look.

Read from the histogram that the server publishes (`obs/table.py`): of its edges, the last one that
is not above the target decides what is late.
"""

from __future__ import annotations

import math
import re

_LINE = re.compile(
    r'^quire:time_to_first_token_seconds_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)$', re.M
)


class LateFirstTokens:
    def __init__(self, target_s: float) -> None:
        """0: none is late."""
        self.target_s = target_s
        self._before = (0.0, 0.0)  # in time, and all

    def share(self, metrics: str) -> float:
        """0 where there were none; `metrics`: in the Prometheus text format."""
        counts = {float(edge): float(count) for edge, count in _LINE.findall(metrics)}
        if not self.target_s or math.inf not in counts:
            return 0.0
        edges = [edge for edge in counts if edge <= self.target_s]
        now = (counts[max(edges)] if edges else 0.0, counts[math.inf])
        before, self._before = self._before, now
        if now[1] < before[1]:  # another process counts from the beginning
            before = (0.0, 0.0)
        in_time, all_ = now[0] - before[0], now[1] - before[1]
        return 1.0 - in_time / all_ if all_ > 0 else 0.0

"""GoodputPolicy: how many replicas a load needs. Ray asks it again and again, and keeps its delays.

By the queue: open requests divided by those that one replica should have. By goodput: while too
many first tokens come too late there is one replica more than now, and never one less. Ray sends
this file's code to its controller, so it imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

LATE = "late_share"  # what replicas report; see `replica.py`


class ScalingContext(Protocol):
    """What is used of Ray's AutoscalingContext."""

    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


class GoodputPolicy:
    def __init__(self, target_requests: float, late_share: float) -> None:
        self.target_requests, self.late_share = target_requests, late_share

    def __call__(self, ctx: ScalingContext) -> tuple[int, dict[str, Any]]:
        wanted = math.ceil(ctx.total_num_requests / self.target_requests)
        reported = dict((ctx.aggregated_metrics or {}).get(LATE, {}))
        late = sum(reported.values()) / len(reported) if reported else 0.0
        if late > self.late_share and ctx.total_num_requests > 0:
            wanted = max(wanted, ctx.current_num_replicas + 1)
        return wanted, {}

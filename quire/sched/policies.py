"""Scheduling policies by name: each is a waiting line, which also says whom to preempt."""

from __future__ import annotations

from quire.config import SchedConfig
from quire.errors import NotSupported
from quire.sched.fair import FairLine
from quire.sched.queue import WaitingLine


def waiting_line(config: SchedConfig) -> WaitingLine:
    policy, aging_s = config.policy, config.priority_aging_s
    if policy == "fcfs":
        return WaitingLine(lambda request: request.timing.arrival)
    if policy == "priority":
        return WaitingLine(lambda request: request.priority + request.timing.arrival / aging_s)
    if policy == "fair":
        return FairLine()
    raise NotSupported(f"got scheduling_policy={policy!r}, want 'fcfs', 'priority' or 'fair'")

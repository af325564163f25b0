"""Scheduling policies by name: each is a waiting line, which also says whom to preempt."""

from __future__ import annotations

from quire.config import SchedConfig
from quire.errors import NotSupported
from quire.request import Request
from quire.sched.fair import FairLine
from quire.sched.queue import BEHIND_ALL, WaitingLine


def waiting_line(config: SchedConfig) -> WaitingLine:
    policy, aging_s = config.policy, config.priority_aging_s

    def fcfs(request: Request) -> float:
        return request.timing.arrival + (BEHIND_ALL if request.is_background else 0.0)

    def priority(request: Request) -> float:
        own = BEHIND_ALL if request.is_background else request.priority
        return own + request.timing.arrival / aging_s

    if policy == "fcfs":
        return WaitingLine(fcfs)
    if policy == "priority":
        return WaitingLine(priority)
    if policy == "fair":
        return FairLine()
    raise NotSupported(f"got scheduling_policy={policy!r}, want 'fcfs', 'priority' or 'fair'")

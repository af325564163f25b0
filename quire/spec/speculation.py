"""Drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.request import RequestId
from quire.sched.scheduler import Scheduler
from quire.step import Draft, StepPlan, TokenEvent


class Drafts(Protocol):
    """Who guesses, and how far: asked before every step, told of every step's outcome."""

    def make(self, scheduler: Scheduler) -> Mapping[RequestId, Draft]:
        """Drafts for requests that decode next; the scheduler may use fewer of them."""
        ...

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent]) -> None:
        """What became of a step, drafts or not; the last event of a request is its end."""
        ...

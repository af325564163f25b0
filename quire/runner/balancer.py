"""Balancer: what moves experts between two steps, as a runner sees it (`engine/copies.py`)."""

from __future__ import annotations

from typing import Protocol


class Balancer(Protocol):
    def is_due(self) -> bool:
        """Asked once a step, by the first rank."""
        ...

    def rebalance(self) -> None:
        """All ranks do it before the same step."""
        ...

    def as_dict(self) -> dict[str, float]:
        """What has come of it so far, for metrics. May be called from another thread."""
        ...

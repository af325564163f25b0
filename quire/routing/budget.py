"""Budget: tokens of the large model that a key may still use, in fixed windows of time.

A key of weight 2 has twice as much. What requests cost is known when they end, so those that run at
once may together go beyond it: the next one pays. `server/spending.py` remembers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.routing.settings import BudgetSettings


class Budget:
    """
    >>> budget = Budget(BudgetSettings(tokens=10, per_s=60), clock=lambda: 0.0)
    >>> budget.spend("a", 9); budget.left("a"), budget.left("b"), budget.left("a", weight=2.0)
    (1, 10, 11)
    """

    def __init__(self, settings: BudgetSettings, clock: Callable[[], float] = time.time) -> None:
        self.settings, self._clock = settings, clock
        self._window, self._spent = -1, dict[str, int]()

    @property
    def window(self) -> int:
        """Its number since 1970."""
        self._turn()
        return self._window

    def spent(self, tenant: str) -> int:
        self._turn()
        return self._spent.get(tenant, 0)

    def left(self, tenant: str, weight: float = 1.0) -> int:
        return int(self.settings.tokens * weight) - self.spent(tenant)

    def spend(self, tenant: str, tokens: int) -> None:
        self._spent[tenant] = self.spent(tenant) + tokens

    def _turn(self) -> None:
        window = int(self._clock() // self.settings.per_s)
        if window != self._window:
            self._window, self._spent = window, {}

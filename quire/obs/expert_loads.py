"""ExpertLoads: how evenly a mixture of experts is used, from the engine's counts every few seconds.

Totals continue across engine processes, like all counters here. Signs of trouble are the busiest
expert of a layer against the average over the last minute, and how many experts got no token. The
tokens of each single expert are exposed only where layers times experts are few.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

MAX_SERIES = 2048  # layers times experts; large models have several times as many
WINDOW_S = 60.0

Tokens = Mapping[int, Sequence[int]]  # layer -> tokens of each of its experts


class LayerLoad(NamedTuple):
    """One layer over the last minute."""

    imbalance: float  # tokens of the busiest expert / those of an average one; 1 is even
    num_idle: int  # experts without a token


class ExpertLoads:
    """
    >>> loads = ExpertLoads(clock=lambda: 0.0)
    >>> loads.update({0: [6, 2, 0, 0]}, pid=1)
    >>> loads.recent()
    {0: LayerLoad(imbalance=3.0, num_idle=2)}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pid: int | None = None
        self._last: Tokens = {}
        self._totals: dict[int, list[int]] = {}
        # What the totals were, oldest first; the first is from before the window.
        self._past: deque[tuple[float, Tokens]] = deque([(clock(), {})])

    def update(self, tokens: Tokens, pid: int) -> None:
        """Take the latest counts of the process `pid`."""
        if pid != self._pid:
            self._pid, self._last = pid, {}
        totals = {}
        for layer, counts in tokens.items():
            before = self._last.get(layer, ())
            # Fewer than before from the same process: a recycled pid, it started again.
            if len(before) != len(counts) or any(map(int.__lt__, counts, before)):
                before = [0] * len(counts)
            total = self._totals.get(layer) or [0] * len(counts)
            totals[layer] = [t + n - b for t, n, b in zip(total, counts, before, strict=True)]
        self._last, self._totals = tokens, totals
        self._past.append((self._clock(), totals))
        self._forget()

    def series(self) -> dict[tuple[str, ...], float]:
        """Tokens so far by (layer, expert); nothing when there would be too many."""
        if sum(map(len, self._totals.values())) > MAX_SERIES:
            return {}
        return {
            (str(layer), str(expert)): count
            for layer, counts in self._totals.items()
            for expert, count in enumerate(counts)
        }

    def recent(self) -> dict[int, LayerLoad]:
        """Layers that got tokens in the last minute."""
        self._forget()
        past, found = self._past[0][1], {}
        for layer, counts in self._totals.items():
            before = past.get(layer) or [0] * len(counts)
            grown = [now - then for now, then in zip(counts, before, strict=True)]
            if total := sum(grown):
                imbalance = round(max(grown) * len(grown) / total, 4)
                found[layer] = LayerLoad(imbalance, grown.count(0))
        return found

    def _forget(self) -> None:
        """Keep one reading from before the window, to compare with."""
        began = self._clock() - WINDOW_S
        while len(self._past) > 1 and self._past[1][0] <= began:
            self._past.popleft()

    def summary(self) -> dict[str, float] | None:
        """The worst layer lately, for a person; None without experts or tokens."""
        recent = self.recent()
        if not recent:
            return None
        worst = max(recent, key=lambda layer: recent[layer].imbalance)
        return {
            "worst_layer": worst,
            "worst_imbalance": recent[worst].imbalance,
            "average_imbalance": round(sum(r.imbalance for r in recent.values()) / len(recent), 4),
            "idle": sum(r.num_idle for r in recent.values()),
        }

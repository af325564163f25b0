"""Which experts get a second home, and where: from how often each was visited. No torch.

Every expert has a first home that never changes. A few more places hold copies of those that the
busiest ranks are asked for most; a copy's visits are dealt in turn, so each home has an equal part
of them. All ranks have counted the same, so all come to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.dist.cuts import Cut


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one layer: ranks beside the first home, by expert."""

    copies: dict[int, tuple[int, ...]]

    def on(self, rank: int) -> list[int]:
        """Experts that a rank has a copy of."""
        return sorted(expert for expert, ranks in self.copies.items() if rank in ranks)


def place_copies(visits: Sequence[int], homes: Sequence[Cut], num_copies: int) -> Placement:
    """As many copies as there are places, or as are of use.

    >>> homes = (Cut(0, 2, 4), Cut(2, 4, 4))
    >>> place_copies([90, 2, 4, 4], homes, 2).copies
    {0: (1,)}
    """
    first = {e: rank for rank, home in enumerate(homes) for e in range(home.begin, home.end)}
    at = {expert: [rank] for expert, rank in first.items()}
    most = -(-num_copies // len(homes))  # places on a rank
    used = [0] * len(homes)
    for _ in range(num_copies):
        loads = rank_loads(visits, at, len(homes))
        best: tuple[float, int, int] | None = None  # largest load afterwards, expert, rank
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank], -rank))
        for expert in (e for e in at if busiest in at[e] and visits[e]):
            for rank in range(len(homes)):
                if rank in at[expert] or used[rank] == most:
                    continue
                after = max(rank_loads(visits, at | {expert: [*at[expert], rank]}, len(homes)))
                if best is None or after < best[0]:
                    best = after, expert, rank
        if best is None or best[0] >= max(loads):
            break
        at[best[1]].append(best[2])
        used[best[2]] += 1
    return Placement({e: tuple(ranks[1:]) for e, ranks in at.items() if len(ranks) > 1})


def rank_loads(visits: Sequence[int], at: dict[int, list[int]], num_ranks: int) -> list[float]:
    loads = [0.0] * num_ranks
    for expert, ranks in at.items():
        for rank in ranks:
            loads[rank] += visits[expert] / len(ranks)
    return loads


def imbalance(visits: Sequence[int], homes: Sequence[Cut], placed: Placement) -> float:
    """What the busiest rank has, in parts of the mean; 1: all have the same.

    >>> imbalance([3, 1], (Cut(0, 1, 2), Cut(1, 2, 2)), Placement({}))
    1.5
    """
    at = {
        expert: [rank, *placed.copies.get(expert, ())]
        for rank, home in enumerate(homes)
        for expert in range(home.begin, home.end)
    }
    loads = rank_loads(visits, at, len(homes))
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

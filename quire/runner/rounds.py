"""Rounds: what several steps take, each measured in turn, and again and again.

Others may use the machine as well, mostly for a while. Where one size is measured five times in a
row such a while falls on that size alone, and the table has a hill that is not there. In rounds it
falls on all sizes alike, and the least of each is from a round that nobody disturbed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

LEAST_ROUNDS, MOST_ROUNDS = 3, 12
Clock = Callable[[], float]


def seconds_of(run: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    begun = clock()
    run()
    return clock() - begun


def affordable(
    steps: Sequence[Callable[[], object]],
    enough_s: float,
    least: int,
    clock: Clock = time.perf_counter,
) -> int:
    """How many of these ever longer steps can be measured in about so many seconds: each is run
    twice, the first time for what is compiled or captured on the way."""
    spent = 0.0
    for count, run in enumerate(steps):
        run()
        spent += LEAST_ROUNDS * seconds_of(run, clock)
        if spent > enough_s and count >= least:
            return count
    return len(steps)


def least_of_rounds(
    steps: Sequence[Callable[[], object]], enough_s: float, clock: Clock = time.perf_counter
) -> list[float]:
    """The shortest time of each in rounds of all, as many as fit into so many seconds."""
    begun = clock()
    least = [float("inf")] * len(steps)
    for num_round in range(MOST_ROUNDS):
        if num_round >= LEAST_ROUNDS and clock() - begun > enough_s:
            break
        least = [
            min(before, seconds_of(run, clock)) for before, run in zip(least, steps, strict=True)
        ]
    return least

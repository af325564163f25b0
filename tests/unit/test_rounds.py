"""What steps take at start, measured while somebody else uses the machine now and then.

Turns red when a while that is disturbed falls on one size alone, or measuring takes for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from quire.runner.rounds import LEAST_ROUNDS, MOST_ROUNDS, affordable, least_of_rounds
from quire.sched.costs import StepCosts

SIZES = (1, 2, 4, 8)
REAL = StepCosts.of([(1, 1.0), (2, 1.1), (4, 1.3), (8, 1.7)])


class Machine:
    """Whose steps take three times as long in some of its seconds."""

    def __init__(self, is_busy: Callable[[float], bool]) -> None:
        self.now, self.num_runs, self._is_busy = 0.0, 0, is_busy

    def run(self, size: int) -> None:
        self.num_runs += 1
        self.now += REAL.seconds(size) * (3.0 if self._is_busy(self.now) else 1.0)

    def steps(self) -> list[Callable[[], object]]:
        return [partial(self.run, size) for size in SIZES]

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("begins", range(0, 30, 3))
def test_a_disturbed_while_falls_on_no_size_alone(begins: int) -> None:
    """Twelve steps' time, which five repeats of one size would lie in."""
    machine = Machine(lambda now: begins <= now < begins + 12)
    least = least_of_rounds(machine.steps(), 30.0, machine.clock)
    assert least == pytest.approx(REAL.times)


def test_a_machine_that_is_always_busy_gives_the_same_shape() -> None:
    machine = Machine(lambda _: True)
    least = least_of_rounds(machine.steps(), 30.0, machine.clock)
    assert [time / least[0] for time in least] == pytest.approx(REAL.times)


def test_measuring_ends() -> None:
    for enough, num in ((0.0, LEAST_ROUNDS), (1e9, MOST_ROUNDS)):
        machine = Machine(lambda _: False)
        least_of_rounds(machine.steps(), enough, machine.clock)
        assert machine.num_runs == num * len(SIZES)
    machine = Machine(lambda _: False)
    assert affordable(machine.steps(), 5.0, 1, machine.clock) == 1
    assert affordable(machine.steps(), 1e9, 1, machine.clock) == len(SIZES)
    assert affordable(machine.steps(), 0.0, 3, machine.clock) == 3

"""The learned bound: what is promised is kept, whatever an entry is like."""

from __future__ import annotations

import math
import random

import pytest

from quire.answers.bound import Seen, error_bound

PROMISE = 0.1


@pytest.mark.parametrize("lapse", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("limit", [-1.0, 1.0, 4.0])
def test_the_promise_is_kept(lapse: float, limit: float) -> None:
    """Red when the bound is below the truth more often than its confidence allows."""
    rng = random.Random(f"{lapse} {limit}")
    num_given = num_wrong = 0
    for _ in range(3):  # entries
        seen: list[Seen] = []
        for _ in range(60):
            gap = rng.expovariate(1.0)
            chance = (1.0 - lapse) / (1.0 + math.exp(2.0 * (gap - limit)))
            agreed = rng.random() < chance
            if error_bound(seen, gap) <= PROMISE:
                num_given += 1
                num_wrong += not agreed
            else:
                seen.append(Seen(gap, agreed))
    assert num_wrong <= PROMISE * num_given + 2 * math.sqrt(num_given * PROMISE)
    if lapse == 0.0 and limit == 4.0:
        assert num_given > 60  # it does learn
    if lapse == 0.2:
        assert num_given < 20  # and sees that no gap helps


def test_more_agreement_is_a_lower_bound() -> None:
    bounds = [error_bound([Seen(1.0, True)] * count, 1.0) for count in (0, 5, 20, 80)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 0.9 and bounds[-1] < 0.05
    agreed = [Seen(1.0, True)] * 40
    assert error_bound([*agreed, Seen(1.0, False)], 1.0) > error_bound(agreed, 1.0)
    assert error_bound(agreed, 6.0) > error_bound(agreed, 0.5)

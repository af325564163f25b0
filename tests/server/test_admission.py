"""Admission: a bounded number of open requests, and an honest word about when to come back."""

from __future__ import annotations

import pytest

from quire.errors import Overloaded
from quire.server.admission import WINDOW_S, Admission
from quire.server.settings import Limits


def admission(**limits: int) -> Admission:
    made = Admission(Limits(**limits))
    made.max_running = 2
    return made


def test_sequences_are_bounded_and_come_free() -> None:
    door = admission(max_queued_requests=3)
    tickets = [door.enter("", 1, 10) for _ in range(5)]
    with pytest.raises(Overloaded, match="5 of 5 places are taken"):
        door.enter("", 1, 10)
    door.leave(tickets.pop())
    tickets.append(door.enter("", 1, 10))
    for ticket in tickets:
        door.leave(ticket)
    assert (door.num_open, door.num_open_tokens) == (0, 0)


def test_n_counts_n() -> None:
    """Red when n=8 takes one place."""
    door = admission(max_queued_requests=3)
    door.enter("", 4, 10)
    with pytest.raises(Overloaded):
        door.enter("", 2, 10)
    door.enter("", 1, 10)


def test_tokens_are_bounded_but_one_request_always_fits() -> None:
    door = admission(max_queued_tokens=100, max_queued_requests=10)
    big = door.enter("", 1, 1_000)
    with pytest.raises(Overloaded, match="1000 of 100 tokens"):
        door.enter("", 1, 1)
    door.leave(big)
    door.enter("", 1, 60)
    with pytest.raises(Overloaded):
        door.enter("", 1, 60)


def test_one_key_cannot_take_every_place() -> None:
    door = admission(max_requests_per_key=2, max_queued_requests=10)
    first = door.enter("a", 1, 1)
    door.enter("a", 1, 1)
    with pytest.raises(Overloaded, match="this key has 2"):
        door.enter("a", 1, 1)
    door.enter("b", 1, 1)
    door.leave(first)
    door.enter("a", 1, 1)


def test_retry_after_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the hint ignores how fast places come free, or believes an old pace."""
    now = 1_000.0
    monkeypatch.setattr("quire.server.admission.time.monotonic", lambda: now)
    door = admission(max_queued_requests=1)

    def hint() -> int:
        held = [door.enter("", 1, 1) for _ in range(3)]
        with pytest.raises(Overloaded) as full:
            door.enter("", 1, 1)
        for ticket in held:
            door.leave(ticket)
        return full.value.retry_after_s

    assert hint() == 5  # nothing has finished yet: a guess
    slow = hint()
    assert 1 <= slow == 10  # three in thirty seconds
    for _ in range(100):
        door.leave(door.enter("", 1, 1))
    assert hint() == 1
    now += WINDOW_S + 1
    assert hint() == 5


def test_a_refusal_takes_nothing() -> None:
    """Red when a refused request keeps a place."""
    door = admission(max_queued_requests=0)
    held = [door.enter("k", 1, 1), door.enter("k", 1, 1)]
    for _ in range(50):
        with pytest.raises(Overloaded):
            door.enter("k", 1, 1)
    for ticket in held:
        door.leave(ticket)
    assert (door.num_open, door.num_open_tokens, len(door._by_key)) == (0, 0, 0)

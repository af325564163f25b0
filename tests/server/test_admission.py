"""Admission: a bounded number of open requests, and an honest word about when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.errors import Overloaded
from quire.server.admission import WINDOW_S, Admission, Size, Ticket
from quire.server.settings import Limits

ONE = Size(1, 10)


def admission(**limits: int) -> Admission:
    made = Admission(Limits(**limits))
    made.max_running = 2
    return made


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 5))  # type: ignore[arg-type]


def test_requests_are_bounded_and_come_free() -> None:
    door = admission(max_queued_requests=3)
    tickets = [door.enter("", ONE) for _ in range(5)]
    with pytest.raises(Overloaded, match="5 of 5 places are taken"):
        door.enter("", ONE)
    door.leave(tickets.pop())
    tickets.append(door.enter("", ONE))
    for ticket in tickets:
        door.leave(ticket)
    assert (door.num_open, door.num_open_sequences, door.num_open_tokens) == (0, 0, 0)


def test_a_request_is_one_place_however_much_it_asks_for() -> None:
    """Red when n=16 can never be let in where there are five places."""
    door = admission(max_queued_requests=3)
    for _ in range(5):
        door.enter("", Size(16, 160))
    with pytest.raises(Overloaded):
        door.enter("", ONE)


def test_tokens_are_bounded_but_one_request_always_fits() -> None:
    door = admission(max_queued_tokens=100, max_queued_requests=10)
    big = door.enter("", Size(1, 1_000))
    with pytest.raises(Overloaded, match="1000 of 100 tokens"):
        door.enter("", Size(1, 1))
    door.leave(big)
    door.enter("", Size(1, 60))
    with pytest.raises(Overloaded):
        door.enter("", Size(1, 60))


def test_one_key_cannot_take_every_place() -> None:
    door = admission(max_requests_per_key=2, max_queued_requests=10)
    first = door.enter("a", ONE)
    door.enter("a", ONE)
    with pytest.raises(Overloaded, match="this key has 2"):
        door.enter("a", ONE)
    door.enter("b", ONE)
    door.leave(first)
    door.enter("a", ONE)


# ------------------------------------------------------------ parts of a request


async def spin() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


class Part:
    """A further part of a request on its way in."""

    def __init__(self, door: Admission, ticket: Ticket, size: Size = ONE) -> None:
        self.door, self.ticket, self.size = door, ticket, size
        self.task = asyncio.ensure_future(door.enter_part(ticket, size))

    async def is_in(self) -> bool:
        await spin()
        return self.task.done()

    def leave(self) -> None:
        self.door.leave_part(self.ticket, self.size)


def test_parts_wait_for_each_other_and_take_no_places() -> None:
    """Red when the parts of one request are refused, or fill the engine's queue for everybody."""

    async def work() -> None:
        door = admission(max_queued_requests=1)
        ticket = door.enter("", ONE)
        parts = [Part(door, ticket) for _ in range(20)]
        assert [await part.is_in() for part in parts] == [True] * 3 + [False] * 17
        assert (door.num_open, door.num_open_sequences) == (1, 4)  # two full batches
        for done in range(17):
            parts[done].leave()
            assert await parts[done + 3].is_in()
            assert door.num_open_sequences == 4
        door.leave(ticket)
        assert (door.num_open, door.num_open_sequences, door.num_open_tokens) == (0, 0, 0)

    run(work)


def test_a_newcomer_goes_before_the_rest_of_a_long_list() -> None:
    """Red when a short request waits until a long one is done."""

    async def work() -> None:
        door = admission(max_queued_requests=8)
        long = door.enter("", ONE)
        parts = [Part(door, long) for _ in range(20)]
        assert await parts[2].is_in() and not await parts[3].is_in()
        short = door.enter("", ONE)  # there is a place for it
        parts[0].leave()
        assert not await parts[3].is_in(), "the newcomer has its room now"
        door.leave(short)
        assert await parts[3].is_in()
        door.leave(long)

    run(work)


def test_a_request_goes_on_however_full_the_server_is() -> None:
    """Red when a request whose parts are done waits for others to leave, perhaps for ever."""

    async def work() -> None:
        door = admission(max_queued_requests=50, max_queued_tokens=1_000)
        long = door.enter("", ONE)
        others = [door.enter("", ONE) for _ in range(40)]
        part = Part(door, long, Size(16, 5_000))
        assert not await part.is_in()
        door.leave_part(long, ONE)
        assert await part.is_in()
        for ticket in (long, *others):
            door.leave(ticket)
        assert (door.num_open, door.num_open_sequences, door.num_open_tokens) == (0, 0, 0)

    run(work)


def test_large_requests_take_turns() -> None:
    """Red when the second of two long lists waits for the end of the first."""

    async def work() -> None:
        door = admission(max_queued_requests=8)
        tickets = [door.enter("", ONE), door.enter("", ONE)]
        order: list[int] = []

        async def feed(number: int) -> None:
            for _ in range(6):
                await door.enter_part(tickets[number], ONE)
                order.append(number)

        feeds = [asyncio.ensure_future(feed(number)) for number in (0, 1)]
        await spin()
        assert order == [0, 0], "as there was room"
        for _ in range(8):
            door.leave_part(max(tickets, key=lambda ticket: ticket.num_parts), ONE)
            await spin()
        assert order[2:] == [0, 1] * 4
        for task in feeds:
            task.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)

    run(work)


def test_a_part_that_gives_up_holds_nothing() -> None:
    """Red when a client that leaves while a part waits, or as it is let in, keeps room taken."""

    async def work() -> None:
        door = admission(max_queued_requests=8)
        ticket, other = door.enter("", Size(4, 40)), door.enter("", ONE)
        first, second = Part(door, ticket), Part(door, other)
        assert not await first.is_in() and not await second.is_in()
        first.task.cancel()
        door.leave_part(ticket, Size(4, 40))  # calls the second up, which leaves in that moment
        second.task.cancel()
        await asyncio.gather(first.task, second.task, return_exceptions=True)
        assert first.task.cancelled() and second.task.cancelled()
        door.leave(ticket)
        door.leave(other)
        assert (door.num_open, door.num_open_sequences, door.num_open_tokens) == (0, 0, 0)
        assert not door._line

    run(work)


# ------------------------------------------------------------ refusals


def test_retry_after_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the hint ignores how fast places come free, or believes an old pace."""
    now = 1_000.0
    monkeypatch.setattr("quire.server.admission.time.monotonic", lambda: now)
    door = admission(max_queued_requests=1)

    def hint() -> int:
        held = [door.enter("", ONE) for _ in range(3)]
        with pytest.raises(Overloaded) as full:
            door.enter("", ONE)
        for ticket in held:
            door.leave(ticket)
        return full.value.retry_after_s

    assert hint() == 5  # nothing has finished yet: a guess
    slow = hint()
    assert 1 <= slow == 10  # three in thirty seconds
    for _ in range(100):
        door.leave(door.enter("", ONE))
    assert hint() == 1
    now += WINDOW_S + 1
    assert hint() == 5


def test_a_refusal_takes_nothing() -> None:
    """Red when a refused request keeps a place."""
    door = admission(max_queued_requests=0)
    held = [door.enter("k", ONE), door.enter("k", ONE)]
    for _ in range(50):
        with pytest.raises(Overloaded):
            door.enter("k", ONE)
    for ticket in held:
        door.leave(ticket)
    assert (door.num_open, door.num_open_tokens, len(door._by_key)) == (0, 0, 0)


def test_a_full_server_keeps_room_for_other_keys_where_it_is_fair() -> None:
    """Red when one key's thousand requests get another key's single one refused."""
    door = Admission(Limits(max_queued_requests=10), is_fair=True)
    door.max_running = 2
    for _ in range(12):
        door.enter("many", ONE)
    with pytest.raises(Overloaded):
        door.enter("many", ONE)
    for _ in range(6):  # an equal share among two
        door.enter("few", ONE)
    with pytest.raises(Overloaded):
        door.enter("few", ONE)
    assert door.num_open == 18

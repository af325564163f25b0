"""Limits across API processes: exact however they race, and free again when one dies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from quire.errors import Overloaded
from quire.server.admission import Admission, Size
from quire.server.board import SharedBoard
from quire.server.settings import Limits

KEYS = ("", "a", "b")
ONE = Size(1, 10)


def door(folder: Path, index: int, count: int = 2, **limits: int) -> Admission:
    made = Admission(Limits(**limits), board=SharedBoard(folder, count, index, KEYS))
    made.max_running = 2
    return made


def test_places_tokens_and_keys_are_counted_together(tmp_path: Path) -> None:
    """Red when each process has limits of its own."""
    one, two = (door(tmp_path, index, max_queued_requests=2) for index in (0, 1))
    tickets = [one.enter("a", ONE), two.enter("a", ONE), one.enter("b", ONE), two.enter("b", ONE)]
    for full in (one, two):
        with pytest.raises(Overloaded, match="4 of 4 places"):
            full.enter("", ONE)
    one.leave(tickets[0])
    two.enter("", ONE)
    heavy = tmp_path / "tokens"
    heavy.mkdir()
    one, two = (door(heavy, index, max_queued_tokens=100) for index in (0, 1))
    one.enter("", Size(1, 60))
    with pytest.raises(Overloaded, match="60 of 100 tokens"):
        two.enter("", Size(1, 60))
    keyed = tmp_path / "keys"
    keyed.mkdir()
    one, two = (door(keyed, index, max_requests_per_key=1) for index in (0, 1))
    one.enter("a", ONE)
    with pytest.raises(Overloaded, match="this key has 1"):
        two.enter("a", ONE)
    two.enter("b", ONE)


def test_a_race_of_processes_never_oversells(tmp_path: Path) -> None:
    """Four processes fight for 50 places as fast as they can. Red without the lock."""
    count, places = 4, 50
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            mine, entered = door(tmp_path, index, count, max_queued_requests=places - 2), 0
            for _ in range(places):
                try:
                    mine.enter("a", ONE)
                    entered += 1
                except Overloaded:
                    pass
            os._exit(entered)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sum(codes) == places
    # They are all dead, and what they held is held until somebody clears it.
    board = SharedBoard(tmp_path, count, -1, KEYS)
    assert board.others("a").num_open == places
    for index in range(count):
        board.clear(index)
    assert board.others("a") == (0, 0, 0, 0, frozenset())


def test_a_part_sees_the_room_that_another_process_made(tmp_path: Path) -> None:
    """Red when a waiting part is called up by requests of its own process alone."""

    async def work() -> None:
        one, two = (door(tmp_path, index) for index in (0, 1))
        other = one.enter("a", Size(3, 10))
        ticket = two.enter("b", ONE)
        part = asyncio.ensure_future(two.enter_part(ticket, ONE))
        gives_up = asyncio.ensure_future(two.enter_part(ticket, ONE))
        await asyncio.sleep(0.1)
        assert not part.done()
        gives_up.cancel()
        await asyncio.gather(gives_up, return_exceptions=True)
        one.leave(other)
        await asyncio.wait_for(part, 5)
        assert two.num_open_sequences == 2
        two.leave(ticket)
        assert (two.num_open_sequences, two.num_open_tokens) == (0, 0)

    asyncio.run(work())

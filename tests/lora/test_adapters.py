"""Which adapters stay in memory, who waits, and when weights go. No tensors, no files."""

from __future__ import annotations

import pytest

from quire.errors import BadRequest, CheckpointError, Overloaded
from quire.lora.adapters import Adapters, Facts
from quire.request import Request, RequestId
from tests.lora.cases import ask


class Shelf:
    """Reads anything at once; the digest of a path can be changed."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.contents: dict[str, bytes] = {}

    def put(self, number: int, path: str) -> Facts:
        if path.endswith("broken"):
            raise CheckpointError(f"no folder {path}")
        self.held[number] = path
        return Facts(self.contents.get(path, path.encode()), 4, 100)

    def drop(self, number: int) -> None:
        del self.held[number]


def adapters(most: int, *names: str) -> Adapters:
    made = Adapters(Shelf(), most)
    for name in names:
        made.load(name, f"/{name}")
    return made


def held(made: Adapters) -> list[str]:
    assert isinstance(made.bank, Shelf)
    return sorted(path.strip("/") for path in made.bank.held.values())


def collected(made: Adapters) -> list[int]:
    ids: list[int] = []
    assert made.collect(lambda request: ids.append(request.id)) == []
    return ids


def test_the_one_unused_longest_makes_room() -> None:
    made = adapters(2, "a", "b")
    assert made.enter(ask(1, [5], "a"))
    made.leave(RequestId(1))
    made.load("c", "/c")
    assert held(made) == ["a", "c"]  # b was never used
    assert made.enter(ask(2, [5], "b")) and held(made) == ["b", "c"]


def test_one_in_use_stays_and_others_wait_in_line() -> None:
    """Red when memory is taken from a running request, or a later request overtakes."""
    made = adapters(2, "a", "b", "c")
    assert made.enter(ask(1, [5], "a")) and made.enter(ask(2, [5], "b"))
    assert not made.enter(ask(3, [5], "c")) and not made.enter(ask(4, [5], "a"))
    assert collected(made) == [] and held(made) == ["a", "b"]
    with pytest.raises(Overloaded, match="max_loras"):
        made.load("d", "/d")
    made.leave(RequestId(2))
    assert collected(made) == [3, 4] and held(made) == ["a", "c"]


def test_unloading_waits_for_the_last_request() -> None:
    made = adapters(2, "a")
    first, second = ask(1, [5], "a"), ask(2, [5], "a")
    made.enter(first)
    made.enter(second)
    made.unload("a")
    with pytest.raises(BadRequest, match="no adapter 'a'; loaded: none"):
        made.enter(ask(3, [5], "a"))
    again = made.load("a", "/other")  # the name is free at once
    made.leave(first.id)
    assert held(made) == ["a", "other"]
    made.leave(second.id)
    made.leave(second.id)
    assert held(made) == ["other"] and again.ref.number != first.adapter.number


def test_a_name_has_one_folder() -> None:
    made = adapters(2, "a")
    assert made.load("a", "/a") is made.entries()[0]
    with pytest.raises(BadRequest, match="unload that first"):
        made.load("a", "/elsewhere")
    with pytest.raises(BadRequest, match="1 to 200 characters"):
        made.load(" ", "/a")


def test_a_folder_that_fails_leaves_nothing() -> None:
    made = adapters(1, "a")
    with pytest.raises(CheckpointError):
        made.load("x", "/broken")
    assert [entry.name for entry in made.entries()] == ["a"]


def test_a_folder_that_changed_is_not_read_again() -> None:
    """Red when cached pages of the old weights could be met by the new ones."""
    made = adapters(1, "a", "b")
    assert isinstance(made.bank, Shelf)
    made.bank.contents["/a"] = b"other"
    with pytest.raises(CheckpointError, match="not what it was"):
        made.enter(ask(1, [5], "a"))
    assert made.enter(ask(2, [5], "b")) and not made.enter(ask(3, [5], "a"))
    made.leave(RequestId(2))
    (event,) = made.collect(lambda request: None)
    assert event.finish == "error" and "not what it was" in (event.error or "")
    assert len(made) == 0


def test_aborting_in_line() -> None:
    made = adapters(1, "a", "b")
    leader: Request = ask(2, [5], "b")
    leader.children = [ask(3, [5], "b")]
    made.enter(ask(1, [5], "a"))
    made.enter(leader)
    assert [e.finish for e in made.abort(RequestId(2), "abort")] == ["abort"]
    made.leave(RequestId(2))
    made.leave(RequestId(1))
    assert collected(made) == [3]


def test_a_line_that_asks_in_turn_moves_on() -> None:
    """Red when somebody who waits keeps an adapter in memory that nobody runs with."""
    made = adapters(1, "a", "b")
    assert made.enter(ask(1, [5], "a"))
    for number, name in enumerate("bab", 2):
        assert not made.enter(ask(number, [5], name))
    for number in (1, 2, 3):
        made.leave(RequestId(number))
        assert collected(made) == [number + 1]

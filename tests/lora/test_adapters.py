"""Which adapters have slots, who waits, and when weights go. No tensors, no files."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quire.errors import BadRequest, CheckpointError, Overloaded
from quire.lora.adapters import Adapters
from quire.lora.host_room import HostRoom
from quire.request import BACKGROUND, Request, RequestId
from quire.step import TokenEvent
from tests.lora.cases import ask
from tests.lora.shelf import SIZE, Shelf, shelved


@dataclass
class Case:
    """Adapters before a scheduler that runs everything at once."""

    adapters: Adapters
    shelf: Shelf
    running: dict[RequestId, Request] = field(default_factory=dict)
    events: list[TokenEvent] = field(default_factory=list)

    def ask(self, id: int, name: str, *, is_background: bool = False, n: int = 1) -> Request:
        """A request that comes, to be passed on at the next `collect`."""
        leader = ask(id, [5], name)
        leader.children = [ask(id + i, [5], name) for i in range(1, n)]
        for member in (leader, *leader.children):
            member.priority = BACKGROUND if is_background else 0
        self.adapters.bind(leader)
        self.adapters.enter(leader)
        return leader

    def collect(self) -> list[int]:
        passed: list[int] = []

        def add(request: Request) -> None:
            self.running[request.id] = request
            passed.append(request.id)

        self.events += self.adapters.collect(add, lambda r: bool(self.running.pop(r.id, None)))
        return passed

    def comes(self, id: int, name: str, *, is_background: bool = False) -> bool:
        """Whether it runs at once."""
        self.ask(id, name, is_background=is_background)
        return id in self.collect()

    def ends(self, id: int) -> None:
        self.running.pop(RequestId(id), None)
        self.adapters.leave(RequestId(id))

    @property
    def held(self) -> list[str]:
        return sorted(path.strip("/") for path in self.shelf.held.values())


def case(
    most: int, *names: str, room: int = 1 << 30, host: HostRoom | None = None, **sched: str | float
) -> Case:
    shelf = Shelf(room)
    made = shelved(shelf, most, host, **sched)
    for name in names:
        made.load(name, f"/{name}")
    return Case(made, shelf)


def test_the_one_unused_longest_makes_room() -> None:
    made = case(2, "a", "b")
    assert made.comes(1, "a")
    made.ends(1)
    made.adapters.load("c", "/c")
    assert made.held == ["a", "c"]  # b was never used
    assert made.comes(2, "b") and made.held == ["b", "c"]


def test_one_in_use_stays_and_others_wait_in_line() -> None:
    """Red when memory is taken from a running request, or a later request overtakes."""
    made = case(2, "a", "b", "c")
    assert made.comes(1, "a") and made.comes(2, "b")
    assert not made.comes(3, "c") and not made.comes(4, "a")
    assert made.collect() == [] and made.held == ["a", "b"]
    with pytest.raises(Overloaded, match="max_loras"):
        made.adapters.load("d", "/d")
    made.ends(2)
    assert made.collect() == [3, 4] and made.held == ["a", "c"]


def test_unloading_waits_for_the_last_request() -> None:
    made = case(2, "a")
    first = made.ask(1, "a")
    made.ask(2, "a")
    made.collect()
    made.adapters.unload("a")
    with pytest.raises(BadRequest, match="no adapter 'a'; loaded: none"):
        made.ask(3, "a")
    again = made.adapters.load("a", "/other")  # the name is free at once
    made.ends(1)
    assert made.held == ["a", "other"]
    made.ends(2)
    made.ends(2)
    assert made.held == ["other"] and again.ref.number != first.adapter.number


def test_a_name_has_one_folder() -> None:
    made = case(2, "a").adapters
    assert made.load("a", "/a") is made.entries()[0]
    with pytest.raises(BadRequest, match="unload that first"):
        made.load("a", "/elsewhere")
    with pytest.raises(BadRequest, match="1 to 200 characters"):
        made.load(" ", "/a")


def test_a_folder_that_fails_leaves_nothing() -> None:
    made = case(1, "a").adapters
    with pytest.raises(CheckpointError):
        made.load("x", "/broken")
    assert [entry.name for entry in made.entries()] == ["a"]


def test_a_folder_that_changed_is_not_read_again() -> None:
    """Red when cached pages of the old weights could be met by the new ones."""
    made = case(1, "a", "b")
    made.shelf.contents["/a"] = b"other"
    made.ask(1, "a", n=2)
    assert made.comes(3, "b")
    assert [event.request_id for event in made.events] == [1, 2]
    assert all("not what it was" in (event.error or "") for event in made.events)
    assert len(made.adapters) == 0 and made.held == ["b"]


def test_aborting_in_line() -> None:
    made = case(1, "a", "b")
    assert made.comes(1, "a")
    made.ask(2, "b", n=2)
    assert made.collect() == []
    assert [e.finish for e in made.adapters.abort(RequestId(2), "abort")] == ["abort"]
    made.ends(2)
    made.ends(1)
    assert made.collect() == [3]


def test_a_line_that_asks_in_turn_moves_on() -> None:
    """Red when somebody who waits keeps an adapter in memory that nobody runs with."""
    made = case(1, "a", "b")
    assert made.comes(1, "a")
    for number, name in enumerate("bab", 2):
        assert not made.comes(number, name)
    for number in (1, 2, 3):
        made.ends(number)
        assert made.collect() == [number + 1]


# ------------------------------------------------------------ who goes first


def test_the_background_waits_behind_everybody() -> None:
    """Red when a line of a batch is before somebody's request, for a slot or for its turn."""
    made = case(2, "a", "b", "c")
    assert made.comes(1, "a") and made.comes(2, "b")
    made.ask(3, "c", is_background=True)
    made.ask(4, "a")
    assert made.collect() == [4]
    made.ends(2)
    made.ask(5, "b")
    assert made.collect() == [5]
    made.ends(5)
    assert made.collect() == [3]


def test_the_background_gives_its_slots_up() -> None:
    """Red when a request waits until a batch is done, or a line of it loses its place for ever."""
    made = case(2, "a", "b", "c")
    made.ask(1, "a", is_background=True, n=2)
    assert made.collect() == [1] and made.comes(3, "b", is_background=True)
    assert not made.comes(4, "c", is_background=True)  # they do not for one of their own
    assert made.comes(5, "c") and made.held == ["b", "c"]  # a was used longest ago
    assert set(made.running) == {3, 5}
    assert made.comes(6, "b") and set(made.running) == {3, 5, 6}  # its adapter is there
    made.ends(3)
    made.ends(6)
    assert made.collect() == [1, 4]
    assert [member.id for member in made.running[RequestId(1)].children] == [2]
    for id in (1, 2, 4, 5):
        made.ends(id)
    assert not any(entry.users for entry in made.adapters.entries())


def test_one_that_somebody_uses_as_well_is_not_taken() -> None:
    made = case(1, "a", "b")
    assert made.comes(1, "a", is_background=True) and made.comes(2, "a")
    assert not made.comes(3, "b")
    made.ends(2)
    assert made.collect() == [3] and set(made.running) == {3}


def test_the_order_is_the_schedulers() -> None:
    """Red when a priority counts for rows and not for adapters."""
    made = case(1, "a", "b", policy="priority", priority_aging_s=30.0)
    assert made.comes(1, "a")
    for id, priority in ((2, 5), (3, 0)):
        request = ask(id, [5], "b")
        request.priority = priority
        made.adapters.bind(request)
        made.adapters.enter(request)
    made.ends(1)
    assert made.collect() == [3, 2]


# ------------------------------------------------------------ a GPU that is full


def test_idle_ones_go_until_there_is_room() -> None:
    """Red when a free slot is taken for free memory."""
    made = case(4, "a", "b", room=2 * SIZE)
    made.adapters.load("c", "/c")
    assert made.held == ["b", "c"]
    assert made.comes(1, "a") and made.held == ["a", "c"]
    assert made.comes(2, "c") and not made.comes(3, "b")  # others have it: it waits
    with pytest.raises(Overloaded, match="no room on the GPU"):
        made.adapters.load("d", "/d")
    made.ends(1)
    assert made.collect() == [3] and made.held == ["b", "c"]
    assert made.events == []


def test_room_that_nobody_has_is_not_waited_for() -> None:
    made = case(4, "a", "b")
    made.shelf.room = 0
    assert made.comes(1, "b")
    made.ends(1)
    made.adapters.unload("b")
    made.adapters._drop_idle()
    assert not made.comes(2, "a")
    assert [event.error for event in made.events] == ["no room on the GPU"]


def test_who_waits_asks_again_when_something_has_changed() -> None:
    """Red when a GPU's allocator is searched at every step, or a change goes unnoticed."""
    made = case(4, "a", "b", room=SIZE)
    assert made.comes(1, "b") and not made.comes(2, "a")
    made.shelf.room = 2 * SIZE
    assert made.collect() == []
    made.adapters.leave(RequestId(99))  # nobody that we know
    assert made.collect() == []
    assert made.comes(3, "b") and set(made.running) == {1, 2, 3}


# ------------------------------------------------------------ copies on the host


def test_many_take_turns_without_their_files() -> None:
    """Red when an adapter that makes room is read again, or copied again, at its next turn."""
    names = [f"{number}" for number in range(64)]
    made = case(32, *names, host=HostRoom(1 << 30))
    for id, name in enumerate(names * 3):
        assert made.comes(id, name)
        made.ends(id)
    assert made.shelf.num_read == 64
    assert len(made.shelf.copies) == 64 and made.held == sorted(names[32:])


@pytest.mark.parametrize("host", [HostRoom(32 * SIZE), HostRoom(1 << 30, max_copies=32)])
def test_a_copy_for_each_that_has_no_slot_is_enough(host: HostRoom) -> None:
    """Red when copies of those that have slots, or the one that comes, cost the others theirs."""
    names = [f"{number}" for number in range(64)]
    made = case(32, *names, host=host)
    for id, name in enumerate(names * 2):
        assert made.comes(id, name)
        made.ends(id)
        assert len(made.shelf.copies) <= 32
    assert made.shelf.num_read == 64


def test_a_copy_goes_with_its_adapter_or_for_want_of_room() -> None:
    made = case(1, "a", "b", "c", host=HostRoom(SIZE))
    assert list(made.shelf.copies.values()) == ["/b"]  # a was dropped earlier
    assert made.comes(1, "a") and made.shelf.num_read == 4
    made.ends(1)
    made.adapters.unload("c")
    assert made.shelf.copies == {}
    small = case(1, "a", "b", host=HostRoom(SIZE - 1))
    assert small.shelf.copies == {}


def test_one_that_was_unloaded_keeps_its_copy_for_who_waits() -> None:
    """Red when a request that was accepted fails since the name went and then the folder."""
    made = case(1, "a", "b", host=HostRoom(1 << 30))
    assert made.comes(1, "b") and not made.comes(2, "a")
    made.adapters.unload("a")
    made.shelf.contents["/a"] = b"other"
    made.ends(1)
    assert made.collect() == [2] and made.events == []
    made.ends(2)
    assert made.held == [] and list(made.shelf.copies.values()) == ["/b"]


def test_a_return_to_a_full_gpu_keeps_its_copy() -> None:
    made = case(2, "a", "b", "c", room=2 * SIZE, host=HostRoom(SIZE))
    assert made.held == ["b", "c"]
    made.shelf.room = SIZE
    assert made.comes(1, "a") and made.held == ["a"] and made.shelf.num_read == 3

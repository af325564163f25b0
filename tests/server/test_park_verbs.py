"""An engine that leaves its memory and takes it again: what it refuses, and who waits for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineArgs
from quire.engine import commands as msg
from quire.engine import parking as parking_module
from quire.engine.parking import SPARE, Offer, Parking, offer_of
from quire.errors import OutOfMemory
from quire.kv.check import check
from quire.step import StepPlan
from tests.lora.shelf import Shelf, shelved
from tests.server.test_process import Connected, Running, Slowly, wait
from tests.unit.case import Case, expected


class Room:
    """A `Place` whose memory is a number. Steps of an engine that is away are an error."""

    def __init__(self) -> None:
        self.weight_bytes, self.page_bytes = 6 << 30, 2 << 30
        self.has_copy, self.is_short, self.took_s = False, False, 0.0
        self.log: list[str] = []

    def leave(self) -> None:
        self.has_copy = True
        self.log.append("leave")

    def take(self) -> None:
        if self.is_short:
            raise OutOfMemory("weights and pages need 8 GiB of GPU memory, 1 GiB are free")
        time.sleep(self.took_s)
        self.log.append("take")

    @property
    def is_away(self) -> bool:
        return self.log[-1:] == ["leave"]


class AtHome(Slowly):
    """A runner that has to be at home."""

    room: Room

    def execute(self, plan: StepPlan) -> Any:
        assert not self.room.is_away, "a step without weights"
        return super().execute(plan)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(parking_module, "free_memory", lambda device: 64 << 30)
    return Room()


def running(folder: Path, room: Room) -> Running:
    made = Running(folder, place=room)
    made.runner = made.case.core.runner = AtHome(made.case)
    made.runner.room = room
    return made


def ask(peer: Connected, command: msg.Command) -> str | None:
    """The error of the answer; None: it was done."""
    peer.say(command)
    while True:
        report = peer.next()
        if isinstance(report, msg.Reply):
            return report.error


def test_a_parked_engine_comes_back_with_an_empty_cache(tmp_path: Path, room: Room) -> None:
    """Red when a step runs without weights, or pages that are gone are taken for cached."""
    engine = running(tmp_path, room)
    peer = engine.connect()
    assert not peer.hello.is_parked
    for number in range(1, 3):
        for id in (10 * number, 10 * number + 1):  # the second finds the first one's pages
            request = peer.submit(id, [1, 2, 3, 4, 5, 6], 4)
            assert peer.tokens_until_end(id)[id] == expected(request, 4)
        assert engine.case.kv.allocator.num_cached > 0
        assert ask(peer, msg.Park(number)) is None and room.is_away
        assert ask(peer, msg.Park(number)) is None  # nothing more to do
        assert engine.case.kv.allocator.num_cached == 0
        check(engine.case.kv)
        assert engine.connect().hello.is_parked
        assert ask(peer, msg.Unpark(number)) is None and not room.is_away
    assert room.log == ["leave", "take"] * 2


def test_a_request_that_comes_while_parked_waits(tmp_path: Path, room: Room) -> None:
    """Red when it is lost, or run without weights. It was on its way when the engine was told."""
    engine = running(tmp_path, room)
    peer, supervisor = engine.connect(), engine.connect()
    assert ask(supervisor, msg.Park(1)) is None
    request = peer.submit(1, [1, 2, 3], 4)
    deadline = time.monotonic() + 10
    while not engine.case.core.has_work:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while True:  # beats say so, and that it is parked
        report = peer.next()
        if isinstance(report, msg.Beat) and report.has_work:
            assert report.is_parked
            break
    assert ask(supervisor, msg.Park(2)) == msg.BUSY
    assert ask(supervisor, msg.Unpark(3)) is None
    assert peer.tokens_until_end(1)[1] == expected(request, 4)


def test_it_is_not_parked_while_requests_run(tmp_path: Path, room: Room) -> None:
    engine = running(tmp_path, room)
    engine.runner.step_s = 0.02
    peer = engine.connect()
    request = peer.submit(1, [1, 2, 3], 20)
    peer.say(msg.Park(7))
    report = peer.next()
    while not isinstance(report, msg.Reply):
        report = peer.next()
    assert report.error == msg.BUSY and room.log == []
    found = peer.tokens_until_end(1)[1]
    assert found == expected(request, 20)[-len(found) :]


def test_it_stays_parked_while_others_have_the_memory(tmp_path: Path, room: Room) -> None:
    """Red when an engine that found no memory runs on, or cannot be told again."""
    engine = running(tmp_path, room)
    peer = engine.connect()
    assert ask(peer, msg.Park(1)) is None
    room.is_short = True
    error = ask(peer, msg.Unpark(2))
    assert error is not None and error.startswith(msg.NO_MEMORY) and "8 GiB" in error
    room.is_short = False
    assert ask(peer, msg.Unpark(4)) is None
    request = peer.submit(1, [1, 2, 3], 4)
    assert peer.tokens_until_end(1)[1] == expected(request, 4)


def test_adapters_wait_for_the_model(tmp_path: Path, room: Room) -> None:
    """Red when an adapter is loaded into memory that is not there."""
    engine = running(tmp_path, room)
    peer = engine.connect()
    assert ask(peer, msg.Park(1)) is None
    error = ask(peer, msg.LoadAdapter(2, "a", "b"))
    assert error is not None and "parked" in error


def test_a_request_with_an_adapter_waits_for_the_model(tmp_path: Path, room: Room) -> None:
    """Red when it is refused since its adapter finds no room on a GPU that the model has left."""

    class Absent(Shelf):
        def _check_room(self) -> None:
            self.is_away = room.is_away
            super()._check_room()

    engine = running(tmp_path, room)
    known = engine.case.core.adapters = shelved(Absent(), 1)
    known.load("a", "/a")
    known.load("b", "/b")
    peer, supervisor = engine.connect(), engine.connect()
    assert ask(supervisor, msg.Park(1)) is None
    requests = [peer.submit(id, [1, 2, id], 4, adapter=name) for id, name in ((1, "a"), (2, "b"))]
    wait(lambda: len(known) == 2)
    assert ask(supervisor, msg.Unpark(2)) is None
    found = peer.tokens_until_end(1, 2)
    assert [found[request.id] for request in requests] == [expected(r, 4) for r in requests]


def test_a_host_without_room_keeps_the_model(
    tmp_path: Path, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when parking takes memory that the host needs; a copy that is there needs no more."""
    free = room.weight_bytes + SPARE - 1
    monkeypatch.setattr(parking_module, "free_memory", lambda device: free)
    engine = running(tmp_path, room)
    peer = engine.connect()
    error = ask(peer, msg.Park(1))
    assert error is not None and error.startswith(msg.NO_MEMORY) and "6.00 GiB" in error
    assert room.log == []
    room.has_copy = True
    assert ask(peer, msg.Park(2)) is None


def test_the_answer_tells_of_locked_memory(tmp_path: Path, room: Room) -> None:
    """Red when whoever counts memory does not hear of a copy, or takes a return for its end."""
    peer = running(tmp_path, room).connect()
    for command in (msg.Unpark(1), msg.Park(2), msg.Unpark(3)):
        peer.say(command)
        while not isinstance(report := peer.next(), msg.Reply):
            pass
        assert report.value == (0 if command.number == 1 else room.weight_bytes)


def test_an_engine_that_cannot_says_so(tmp_path: Path) -> None:
    engine = Running(tmp_path)
    error = ask(engine.connect(), msg.Park(1))
    assert error is not None and "cannot" in error


def test_who_can_be_parked_is_decided_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when an engine claims what it cannot do, or does not say why not."""
    import torch

    from quire.flat_args import args_of

    gpu, core = torch.device("cuda"), Case().core
    assert offer_of(False, EngineArgs(), gpu) == Offer()
    assert offer_of(True, EngineArgs(), torch.device("cpu")) == Offer()
    ranks = args_of({"tensor_parallel_size": 2})
    assert "2 ranks" in offer_of(True, ranks, gpu).why
    assert "kv_role" in offer_of(True, EngineArgs(kv_role="prefill"), gpu).why
    assert offer_of(True, EngineArgs(), gpu).why  # no driver here: what is missing
    decisions: list[Any] = []
    assert Offer(None, "a reason").taken(core, decisions) is None
    assert decisions[0].value == "by a process without weights" and decisions[0].why == "a reason"
    monkeypatch.setattr(parking_module, "free_memory", lambda device: 64 << 30)
    room: Any = Room()
    assert isinstance(Offer(room).taken(core, decisions), Parking)
    assert "6.00 GiB" in decisions[1].value and "2.00 GiB" in decisions[1].why
    room.weight_bytes = 0
    assert Offer(room).taken(core, decisions) is None and "elsewhere" in decisions[2].why
    room.weight_bytes = 63 << 30
    assert Offer(room).taken(core, decisions) is None and "63.00 GiB" in decisions[3].why

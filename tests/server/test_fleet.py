"""A fleet whose engines are played by scripts: who is started, parked, restarted and given up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.config import EngineArgs
from quire.server import fleet as fleet_module
from quire.server.fleet import Fleet, Slot
from quire.server.model_files import ModelState
from quire.server.settings import ModelSettings, ServeSettings

ENGINE = """
import pathlib, signal, sys, threading, time
from quire.server.lifeline import begin
from quire.server.model_files import ModelFolder
from quire.server.settings import ServeSettings

settings = begin(ServeSettings, int(sys.argv[1]))
folder = ModelFolder(pathlib.Path(settings.runtime_folder))
if settings.engine.model == "bad":
    folder.fail("no tensors")
    sys.exit(2)
if settings.is_parked:
    if settings.engine.model == "slow":
        time.sleep(0.5)
    if settings.engine.model == "orphan" and folder.socket.exists():
        sys.exit(1)
    woken = threading.Event()
    signal.signal(signal.SIGUSR2, lambda number, frame: woken.set())
    folder.set_parked(True)
    while not woken.wait(0.01):
        pass
folder.socket.touch()
time.sleep(60)
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fleet]]:
    (tmp_path / "played_engine.py").write_text(ENGINE)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{tmp_path}")
    monkeypatch.setattr(fleet_module, "BUSY_S", 0.05)
    made: list[Fleet] = []

    def fleet(*models: ModelSettings, memory: int = 0) -> Fleet:
        one = Fleet(ServeSettings(models=models, memory=memory, runtime_folder=str(tmp_path)))
        for child in one.children:
            child.module = "played_engine"
        made.append(one)
        return one

    yield fleet
    for one in made:
        for slot in one.slots:
            slot.stop()


def model(name: str, at_start: bool = True, **own: float) -> ModelSettings:
    return ModelSettings(name=name, engine=EngineArgs(model=name), at_start=at_start, **own)


def tick_until(fleet: Fleet, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, [slot.folder.read() for slot in fleet.slots]
        fleet.tick()
        time.sleep(0.01)


def becomes(fleet: Fleet, slot: Slot, state: str) -> None:
    tick_until(fleet, lambda: slot.folder.read().state == state)


def test_each_goes_its_own_way(make: Callable[..., Fleet]) -> None:
    """Red when a model that cannot be loaded, or dies, has a say in another's life."""
    fleet = make(model("good"), model("bad"), model("later", at_start=False))
    good, bad, later = fleet.slots
    becomes(fleet, good, "ready")
    becomes(fleet, bad, "failed")
    assert bad.folder.read().reason == "no tensors" and bad.child.process is None
    assert later.folder.read().state == "unloaded" and later.child.process is None
    assert good.child.process is not None
    before = good.child.process.pid
    later.folder.ask("load")
    becomes(fleet, later, "ready")
    good.child.signal(signal.SIGKILL)
    becomes(fleet, good, "loading")
    becomes(fleet, good, "ready")
    assert good.child.process is not None and good.child.process.pid != before
    assert later.folder.read().state == "ready" and bad.folder.read().state == "failed"
    bad.folder.ask("load")  # an operator tries again
    becomes(fleet, bad, "loading")
    becomes(fleet, bad, "failed")


def test_parking_and_waking(make: Callable[..., Fleet]) -> None:
    """Red when a parked model keeps its engine, a busy one loses it, or waking starts over."""
    fleet = make(model("one", park_after_s=0.3))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    for _ in range(20):  # somebody uses it
        slot.folder.touch()
        fleet.tick()
        time.sleep(0.03)
    assert slot.folder.read().state == "ready"
    becomes(fleet, slot, "parked")
    assert slot.folder.is_parked and not slot.folder.socket.exists()
    assert slot.child.process is not None
    warm = slot.child.process.pid
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")
    assert slot.child.process.pid == warm
    slot.folder.ask("unload")
    becomes(fleet, slot, "unloaded")
    assert slot.child.process is None


def test_a_model_stays_ready_until_its_heir_has_imported(make: Callable[..., Fleet]) -> None:
    """Red when `parked` is said while somebody who comes would wait for imports."""
    fleet = make(model("slow"))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    assert slot.child.process is not None
    loaded = slot.child.process.pid
    slot.folder.ask("park")
    tick_until(fleet, lambda: slot.heir is not None)
    assert len(fleet.children) == 2
    seen: list[tuple[str, bool, bool]] = []

    def is_swapped() -> bool:
        state = slot.folder.read().state
        seen.append((state, slot.folder.socket.exists(), slot.folder.is_parked))
        return slot.heir is None

    tick_until(fleet, is_swapped)
    assert seen[-1] == ("parked", False, True)
    assert {(state, socket) for state, socket, _ in seen[:-1]} == {("ready", True)}
    assert slot.child.process is not None and slot.child.process.pid != loaded
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")


def test_who_comes_while_the_heir_imports_keeps_the_model(make: Callable[..., Fleet]) -> None:
    """Red when an idle model is parked though somebody has named it since."""
    fleet = make(model("slow", park_after_s=0.3))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    assert slot.child.process is not None
    loaded = slot.child.process.pid
    tick_until(fleet, lambda: slot.heir is not None)
    slot.folder.touch()
    fleet.tick()
    assert slot.heir is None and not slot.folder.is_parked
    assert slot.child.process.pid == loaded and slot.folder.socket.exists()
    becomes(fleet, slot, "parked")  # idle again


@pytest.mark.parametrize(("name", "memory"), [("orphan", 0), ("slow", 1)])
def test_without_an_heir_a_model_is_parked_at_once(
    make: Callable[..., Fleet], name: str, memory: int
) -> None:
    """One that dies, or has no room beside the weights."""
    fleet = make(model(name), memory=memory)
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    tick_until(fleet, lambda: slot.folder.is_parked)
    assert slot.heir is None
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")


def test_who_was_idle_longest_makes_room(make: Callable[..., Fleet]) -> None:
    """Red when memory is overrun, or a model that nobody named makes another go."""
    fleet = make(model("a"), model("b", at_start=False), model("c"), memory=1)
    a, b, c = fleet.slots
    becomes(fleet, a, "ready")  # alone it may be larger than we think
    assert c.folder.read().state == "unloaded"  # at start, but nobody named it
    time.sleep(0.1)
    b.folder.ask("load")
    becomes(fleet, b, "ready")
    assert a.folder.read().state == "unloaded" and a.child.process is None
    b.folder.touch()
    a.folder.ask("load")
    fleet.tick()
    fleet.tick()
    told = a.folder.read()
    assert told.state == "loading" and "waits for memory" in told.reason
    becomes(fleet, a, "ready")  # once b is idle
    assert b.child.process is None


def test_a_batch_loses_no_model_that_it_works_in(make: Callable[..., Fleet]) -> None:
    """Red when an engine is ended, for want of memory or for an heir, while lines are in it, or
    when it stays for them once they are gone."""
    fleet = make(model("a"), model("b", at_start=False), memory=1)
    a, b = fleet.slots
    becomes(fleet, a, "ready")
    b.folder.ask_softly()
    for _ in range(20):
        fleet.tick()
        time.sleep(0.01)
    assert b.folder.read().state == "unloaded" and a.wanted == "ready"
    b.folder.ask("load")

    def is_told() -> bool:
        a.folder.work()
        return b.folder.read().waits_for == ("a",) and a.wanted == "unloaded"

    tick_until(fleet, is_told)
    for _ in range(20):
        a.folder.work()
        fleet.tick()
        time.sleep(0.01)
    assert a.folder.read().state == "ready"
    a.folder.stop_work()
    becomes(fleet, b, "ready")
    assert a.child.process is None


def test_a_parked_model_that_waits_for_memory_says_so_once(
    make: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when it is told to be parked and loading by turns, at every tick."""
    fleet = make(model("a"), model("b"))
    a, b = fleet.slots
    becomes(fleet, a, "ready")
    becomes(fleet, b, "ready")
    a.folder.ask("park")
    becomes(fleet, a, "parked")
    tick_until(fleet, lambda: a.folder.is_parked)
    fleet.memory = 1
    told: list[ModelState] = []
    monkeypatch.setattr(a.folder, "tell", told.append)
    a.folder.ask("load")
    for _ in range(10):
        b.folder.touch()
        fleet.tick()
    assert [(one.state, one.waits_for) for one in told] == [("loading", ("b",))]

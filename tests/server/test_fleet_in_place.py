"""A fleet whose engines can leave a GPU's memory; scripts play them, and files their GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.server import fleet as fleet_module
from quire.server.fleet import Fleet, Slot
from quire.server.settings import ModelSettings, ServeSettings
from tests.server.test_fleet import becomes, model, tick_until

# Each engine takes one of as many places as the file `places` says; a parked one has none.
ENGINE = """
import fcntl, pathlib, signal, sys, threading, time
from quire.engine import commands as msg
from quire.engine.peer import listen
from quire.engine.wire import Codec, receive
from quire.server.lifeline import begin
from quire.server.model_files import Home, ModelFolder
from quire.server.settings import ServeSettings

settings = begin(ServeSettings, int(sys.argv[1]))
folder, name = ModelFolder(pathlib.Path(settings.runtime_folder)), settings.engine.model
gpu = folder.path.parent
held = gpu / f"held-{name}"

def is_taken():
    with (gpu / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if len(list(gpu.glob("held-*"))) >= int((gpu / "places").read_text()):
            return False
        held.touch()
        return True

with (gpu / "starts").open("a") as file:
    file.write(f"{name} {settings.is_parked}\\n")
if settings.is_parked:
    woken = threading.Event()
    signal.signal(signal.SIGUSR2, lambda number, frame: woken.set())
    folder.set_parked(True)
    while not woken.wait(0.01):
        pass
held.unlink(missing_ok=True)  # of one that died
if not is_taken():
    folder.fail("the weights do not fit")
    folder.set_short()
    sys.exit(2)
if name == "lingers":
    time.sleep(0.5)
assert settings.parks
folder.set_home(Home("cuda", 1 << 40 if name == "heavy" else 0))
listener = listen(folder.socket)
commands, reports = Codec(msg.Command), Codec(msg.Report)
is_parked = False

def answer(command):
    global is_parked
    if isinstance(command, msg.Park):
        if name == "busy" and not (gpu / "idle").exists():
            return msg.BUSY
        if name == "poor":
            return msg.NO_MEMORY + "the host has none"
        if name == "hangs":
            time.sleep(60)
        if name == "lingers":
            time.sleep(0.3)
        held.unlink(missing_ok=True)
    else:
        if name == "hesitates":
            time.sleep(0.2)
        if not is_taken():
            return msg.NO_MEMORY + "8 GiB needed, 1 GiB are free"
        if name == "lingers":
            time.sleep(0.6)
    is_parked = isinstance(command, msg.Park)
    return None

while True:
    connection, _ = listener.accept()
    connection.sendall(reports.frame(msg.Beat({}, False, False, 0.0)))
    while (body := receive(connection)) is not None:
        command = commands.decode(body)
        locked = 1 << 40 if name == "locks" else 0
        connection.sendall(reports.frame(msg.Reply(command.number, locked, answer(command))))
    connection.close()
"""


class Gpu:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hold(1)

    def hold(self, num_models: int) -> None:
        (self.folder / "places").write_text(str(num_models))

    @property
    def held(self) -> set[str]:
        return {path.name.removeprefix("held-") for path in self.folder.glob("held-*")}

    @property
    def starts(self) -> list[str]:
        return (self.folder / "starts").read_text().splitlines()


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


@pytest.fixture
def make(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Fleet]]:
    (tmp_path / "gpu_engine.py").write_text(ENGINE)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{tmp_path}")
    monkeypatch.setattr(fleet_module, "BUSY_S", 0.05)
    made: list[Fleet] = []

    def fleet(*models: ModelSettings, memory: int = 0) -> Fleet:
        one = Fleet(ServeSettings(models=models, memory=memory, runtime_folder=str(tmp_path)))
        for child in one.children:
            child.module = "gpu_engine"
        made.append(one)
        return one

    yield fleet
    for one in made:
        for slot in one.slots:
            slot.stop()


def pid(slot: Slot) -> int:
    assert slot.child.process is not None
    return slot.child.process.pid


def test_parking_keeps_the_process(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when a process is started anew, or the model is said to be there when it is not."""
    fleet = make(model("one"))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    before = pid(slot)
    for _ in range(2):
        slot.folder.ask("park")
        becomes(fleet, slot, "parked")
        assert gpu.held == set() and slot.folder.socket.exists()
        slot.folder.ask("load")
        becomes(fleet, slot, "ready")
        assert gpu.held == {"one"}
    assert pid(slot) == before and gpu.starts == ["one False"] and slot.heir is None
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    slot.folder.ask("unload")
    becomes(fleet, slot, "unloaded")
    assert slot.child.process is None
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")
    assert pid(slot) != before


def test_an_idle_model_is_parked_and_a_used_one_is_not(make: Callable[..., Fleet]) -> None:
    fleet = make(model("one", park_after_s=0.3))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    for _ in range(20):
        slot.folder.touch()
        fleet.tick()
        time.sleep(0.03)
    assert slot.folder.read().state == "ready"
    becomes(fleet, slot, "parked")
    assert slot.is_away


def test_who_was_idle_longest_leaves_the_gpu(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when a model that comes back finds no memory though somebody idle has it, when one that
    was never loaded fails for the same reason, or when a process is started for it."""
    fleet = make(model("a"), model("b", at_start=False))
    a, b = fleet.slots
    becomes(fleet, a, "ready")
    b.folder.ask("load")  # its first start finds the GPU full
    becomes(fleet, b, "ready")
    assert gpu.held == {"b"} and a.folder.read().state == "parked"
    before = pid(a), pid(b)
    num_starts = len(gpu.starts)
    for back, other in ((a, b), (b, a), (a, b)):
        back.folder.ask("load")
        becomes(fleet, back, "ready")
        assert gpu.held == {back.own.name} and other.folder.read().state == "parked"
    assert (pid(a), pid(b)) == before and len(gpu.starts) == num_starts


def test_a_model_waits_for_one_that_works(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when requests that run lose their model, or who waits is not told for what."""
    fleet = make(model("a"), model("busy", at_start=False))
    a, busy = fleet.slots
    becomes(fleet, a, "ready")
    a.folder.ask("park")
    becomes(fleet, a, "parked")
    busy.folder.ask("load")
    becomes(fleet, busy, "ready")
    a.folder.ask("load")
    tick_until(fleet, lambda: "waits for GPU memory" in a.folder.read().reason)
    assert "8 GiB needed" in a.folder.read().reason
    for _ in range(30):
        fleet.tick()
        time.sleep(0.01)
    assert busy.folder.read().state == "ready" and gpu.held == {"busy"}
    (gpu.folder / "idle").touch()
    becomes(fleet, a, "ready")
    assert busy.folder.read().state == "parked" and a.folder.read().reason == ""


def test_memory_that_strangers_have_is_not_waited_for(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when a model waits for ever for memory that no model of ours can give."""
    fleet = make(model("a"))
    (a,) = fleet.slots
    becomes(fleet, a, "ready")
    a.folder.ask("park")
    becomes(fleet, a, "parked")
    gpu.hold(0)
    a.folder.ask("load")
    becomes(fleet, a, "failed")
    assert "do not fit" in a.folder.read().reason and gpu.starts == ["a False"] * 2


def test_nobody_leaves_for_a_model_that_nobody_named(make: Callable[..., Fleet], gpu: Gpu) -> None:
    fleet = make(model("a"), model("b"))
    a, b = fleet.slots

    def is_settled() -> bool:
        return {slot.folder.read().state for slot in (a, b)} == {"ready", "unloaded"}

    tick_until(fleet, is_settled)
    for _ in range(30):
        fleet.tick()
        time.sleep(0.01)
    assert is_settled()


def test_an_engine_that_is_refused_is_parked_by_an_heir(make: Callable[..., Fleet]) -> None:
    fleet = make(model("poor"))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    before = pid(slot)
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    assert pid(slot) != before and slot.folder.is_parked and not slot.folder.socket.exists()
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")
    assert slot.can_leave  # it may go better next time


def test_a_parked_engine_that_dies_is_parked_again(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when what was true of the one that died is believed of the next."""
    fleet = make(model("one"))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    slot.child.signal(signal.SIGKILL)
    becomes(fleet, slot, "loading")
    becomes(fleet, slot, "parked")
    assert not slot.is_away and slot.folder.is_parked
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")
    assert gpu.held == {"one"} and gpu.starts == ["one False", "one True"]


def test_an_engine_that_does_not_answer_is_restarted(
    make: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "ANSWER_S", 0.2)
    fleet = make(model("hangs"))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    before = pid(slot)
    slot.folder.ask("park")
    becomes(fleet, slot, "loading")
    becomes(fleet, slot, "parked")
    assert pid(slot) != before and not slot.is_away


def parked(fleet: Fleet, slot: Slot) -> int:
    """Its process."""
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    return pid(slot)


def test_memory_that_was_just_left_is_asked_for_again(make: Callable[..., Fleet]) -> None:
    """Red when a model that was refused is started anew, and loses its requests, since whoever had
    the memory has left before the fleet heard of the refusal."""
    fleet = make(model("lingers", at_start=False), model("a"))
    other, a = fleet.slots
    becomes(fleet, a, "ready")
    before = parked(fleet, a)
    other.folder.ask("load")
    becomes(fleet, other, "ready")
    time.sleep(2 * fleet_module.BUSY_S)
    other.folder.ask("park")
    a.folder.ask("load")
    fleet.tick()
    assert other.line is not None and a.line is not None
    time.sleep(0.6)  # both have answered
    becomes(fleet, a, "ready")
    assert pid(a) == before


def test_of_two_that_come_back_one_waits(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when the slower one is started anew, as if strangers had the memory."""
    fleet = make(model("lingers", at_start=False), model("hesitates"))
    first, second = fleet.slots
    becomes(fleet, second, "ready")
    before = parked(fleet, second)
    first.folder.ask("load")
    becomes(fleet, first, "ready")
    parked(fleet, first)
    for slot in fleet.slots:
        slot.folder.ask("load")
    becomes(fleet, first, "ready")
    becomes(fleet, second, "ready")
    assert pid(second) == before and gpu.held == {"hesitates"}


def test_a_model_waits_for_one_that_is_loaded_in_its_place(
    make: Callable[..., Fleet], gpu: Gpu
) -> None:
    """Red when a parked model fails since the one it made room for is still being loaded."""
    fleet = make(model("a"), model("lingers", at_start=False))
    a, other = fleet.slots
    becomes(fleet, a, "ready")
    before = pid(a)
    other.folder.ask("load")  # its first start finds no memory
    tick_until(fleet, lambda: gpu.held == {"lingers"})
    assert other.folder.read().state == "loading"
    a.folder.ask("load")
    becomes(fleet, a, "ready")
    assert pid(a) == before


def test_a_model_that_was_short_once_asks_nobody_to_leave(
    make: Callable[..., Fleet], gpu: Gpu
) -> None:
    """Red when a start waits for others though there is memory by now."""
    fleet = make(model("a"), model("b", at_start=False))
    a, b = fleet.slots
    becomes(fleet, a, "ready")
    b.folder.ask("load")
    becomes(fleet, b, "ready")
    gpu.hold(2)
    a.folder.ask("load")
    becomes(fleet, a, "ready")
    b.folder.ask("unload")
    becomes(fleet, b, "unloaded")
    time.sleep(2 * fleet_module.BUSY_S)
    b.folder.ask("load")
    becomes(fleet, b, "ready")
    assert gpu.held == {"a", "b"} and a.folder.read().state == "ready"


def test_who_was_told_to_leave_and_works_again_keeps_nobody(
    make: Callable[..., Fleet], gpu: Gpu
) -> None:
    """Red when a model waits for one that has requests while another one is idle."""
    gpu.hold(2)
    fleet = make(model("b", at_start=False), model("c", at_start=False), model("a"))
    b, c, a = fleet.slots
    becomes(fleet, a, "ready")
    parked(fleet, a)
    for slot in (b, c):
        slot.folder.ask("load")
        becomes(fleet, slot, "ready")
    time.sleep(2 * fleet_module.BUSY_S)
    a.folder.ask("load")
    tick_until(fleet, lambda: b.wanted == "parked")
    assert b.line is None

    def is_back() -> bool:
        b.folder.touch()
        return a.folder.read().state == "ready"

    tick_until(fleet, is_back)
    assert gpu.held == {"a", "b"} and b.folder.read().state == "ready"


def test_a_model_that_others_left_for_meanwhile_is_started_again(
    make: Callable[..., Fleet], gpu: Gpu
) -> None:
    """Red when a start that found no memory is final though whoever had it has just left."""
    fleet = make(model("a"), model("b", at_start=False))
    a, b = fleet.slots
    becomes(fleet, a, "ready")
    b.folder.ask("load")
    fleet.tick()
    process = b.child.process
    assert process is not None
    process.wait()  # nobody has looked yet
    a.is_away, a.wanted = True, "parked"
    (gpu.folder / "held-a").unlink()
    a.set("parked")
    becomes(fleet, b, "ready")


# ------------------------------------------------------------ batches


def test_a_batch_takes_no_place(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when a model goes for lines of a batch, or these have one started again and again."""
    fleet = make(model("a"), model("b", at_start=False))
    a, b = fleet.slots
    becomes(fleet, a, "ready")

    def stays_away(state: str) -> None:
        for _ in range(20):
            b.folder.ask_softly()
            fleet.tick()
            time.sleep(0.01)
        tick_until(fleet, lambda: b.line is None and b.state.state == state)
        assert gpu.held == {"a"} and a.folder.read().state == "ready"

    b.folder.ask_softly()
    tick_until(fleet, lambda: b.was_short)  # nobody knew
    num_starts = len(gpu.starts)
    stays_away("unloaded")
    assert len(gpu.starts) == num_starts
    parked(fleet, a)
    b.folder.ask_softly()
    becomes(fleet, b, "ready")
    a.folder.ask("load")  # somebody comes
    becomes(fleet, a, "ready")
    assert b.folder.read().state == "parked"
    stays_away("parked")
    b.folder.ask("load")
    becomes(fleet, b, "ready")


def test_a_batch_gives_way_before_its_model_goes(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when lines keep a model in its place, or lose it in the midst of their work."""
    fleet = make(model("a", park_after_s=0.3), model("b", at_start=False))
    a, b = fleet.slots
    becomes(fleet, a, "ready")
    time.sleep(0.4)
    for _ in range(20):  # nobody but a batch uses it
        a.folder.work()
        fleet.tick()
        time.sleep(0.02)
    assert a.folder.read().state == "ready" and a.line is None
    b.folder.ask("load")

    def is_told() -> bool:
        a.folder.work()
        return b.folder.read().waits_for == ("a",) and a.wanted == "parked"

    tick_until(fleet, is_told)
    a.folder.ask_softly()  # another line comes
    for _ in range(20):
        a.folder.work()
        fleet.tick()
        time.sleep(0.01)
    assert a.line is None and a.wanted == "parked" and gpu.held == {"a"}
    a.folder.stop_work()
    becomes(fleet, b, "ready")
    assert a.folder.read().state == "parked" and b.folder.read().waits_for == ()


# ------------------------------------------------------------ memory of the host


def test_a_copy_of_the_weights_counts(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when locked memory, which no process has by the system's word, is forgotten, or goes on
    counting when its process has ended."""
    gpu.hold(2)
    fleet = make(model("locks"), model("b", at_start=False), memory=1 << 40)
    first, b = fleet.slots
    becomes(fleet, first, "ready")
    assert first.memory < 1 << 40
    first.folder.ask("park")
    becomes(fleet, first, "parked")
    assert first.memory > 1 << 40
    b.folder.ask("load")
    becomes(fleet, b, "ready")
    assert first.folder.read().state == "unloaded" and first.memory == 0


def test_a_copy_that_was_made_stays_while_the_model_works(make: Callable[..., Fleet]) -> None:
    fleet = make(model("locks"))
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")
    assert slot.memory > 1 << 40
    slot.child.signal(signal.SIGKILL)
    becomes(fleet, slot, "loading")
    assert slot.locked == 0


def test_weights_without_room_for_a_copy_are_dropped(make: Callable[..., Fleet], gpu: Gpu) -> None:
    """Red when parking takes more of the host than the models may have together."""
    fleet = make(model("heavy"), memory=1 << 40)
    (slot,) = fleet.slots
    becomes(fleet, slot, "ready")
    before = pid(slot)
    slot.folder.ask("park")
    becomes(fleet, slot, "parked")
    assert pid(slot) != before and slot.folder.is_parked and slot.locked == 0
    slot.folder.ask("load")
    becomes(fleet, slot, "ready")
    assert gpu.held == {"heavy"}

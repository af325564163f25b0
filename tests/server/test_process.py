"""The engine process's loop, in a thread or a process of its own, over a real socket."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import CacheConfig
from quire.engine import commands as msg
from quire.engine import idle_work as idle_module
from quire.engine import peer as peer_module
from quire.engine.parking import Parking, Place
from quire.engine.peer import ID_BITS, Peer
from quire.engine.process import STUCK, EngineProcess, Patience
from quire.engine.wire import Codec, receive
from quire.grammar.live import LiveMatchers
from quire.grammar.pending import GrammarQueue
from quire.params import SamplingParams, StructuredOutputsParams
from quire.request import BACKGROUND, Request
from quire.step import StepPlan
from tests.lora.shelf import Shelf, shelved
from tests.unit.case import Case, expected

ROOT = Path(__file__).parents[2]
COMMANDS: Codec[msg.Command] = Codec(msg.Command)  # type: ignore[arg-type]
REPORTS: Codec[msg.Report] = Codec(msg.Report)  # type: ignore[arg-type]


@dataclass
class Slowly:
    """A runner that takes a moment for each step, so that a test can act between two."""

    case: Case
    step_s: float = 0.0

    def execute(self, plan: StepPlan) -> Any:
        time.sleep(self.step_s)
        return self.case.execute(plan)


class Running:
    """An EngineProcess around the page-content runner, in a thread."""

    def __init__(
        self, folder: Path, runs: bool = True, place: Place | None = None, **options: Any
    ) -> None:
        """`place`: where an engine that can be parked leaves its memory."""
        self.case = Case(**options)
        self.runner = Slowly(self.case)
        self.case.core.runner = self.runner
        self.case.scheduler.clock = time.monotonic
        sched = self.case.config
        config = SimpleNamespace(sched=sched, cache=CacheConfig(), decisions=())
        spec = SimpleNamespace(
            architecture="Fake", vocab_size=7, hidden_size=1, eos_ids=(), num_params=9
        )
        core = self.case.core
        parking = None if place is None else Parking(place, core)
        runner = SimpleNamespace(balancer=None)
        parts = {"core": core, "runner": runner, "group": None, "tiers": None, "parking": parking}
        engine: Any = SimpleNamespace(config=config, spec=spec, **parts)
        self.address = folder / "engine.sock"
        queue_s = 0.6 if place is None else 60.0  # who waits for a parked engine is not to be ended
        self.process = EngineProcess(engine, self.address, 0.0, Patience(60, 60, queue_s=queue_s))
        if runs:
            threading.Thread(target=self.process.run, daemon=True).start()

    def connect(self) -> Connected:
        return Connected(self.address)

    @property
    def num_live(self) -> int:
        return self.case.kv.allocator.num_live


class Connected:
    """The API process's side, blocking."""

    def __init__(self, address: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(address))
        hello = self.next()
        assert isinstance(hello, msg.Hello)
        self.hello, self.first_id = hello, hello.first_id

    def next(self) -> msg.Report:
        body = receive(self.socket)
        assert body is not None, "the engine closed the connection"
        return REPORTS.decode(body)

    def say(self, command: msg.Command) -> None:
        self.socket.sendall(COMMANDS.frame(command))

    def submit(
        self,
        id: int,
        prompt: list[int],
        max_tokens: int,
        n: int = 1,
        *,
        adapter: str = "",
        **params: Any,
    ) -> Request:
        first, wish = self.first_id + id, SamplingParams(max_tokens=max_tokens, **params)
        made = [Request.new(first + i, prompt, wish, seed=0) for i in range(n)]
        made[0].children, made[0].adapter_name = made[1:], adapter
        made[0].timing.arrival = time.monotonic()
        self.say(msg.submit_of(made[0]))
        return made[0]

    def tokens_until_end(self, *ids: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {id: [] for id in ids}
        left = set(ids)
        while left:
            report = self.next()
            for event in report.events if isinstance(report, msg.Events) else []:
                id = event.request_id - self.first_id
                found[id] += event.tokens
                if event.finish is not None:
                    left.discard(id)
        return found

    def error_of(self, id: int) -> str | None:
        while True:
            report = self.next()
            for event in report.events if isinstance(report, msg.Events) else []:
                if event.request_id == self.first_id + id and event.finish is not None:
                    return event.error


@pytest.fixture
def running(tmp_path: Path) -> Running:
    return Running(tmp_path, max_num_seqs=2)


def wait(is_so: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_requests_are_answered(running: Running) -> None:
    peer = running.connect()
    made = [peer.submit(i, [i, 2, 3], 6) for i in range(1, 5)]
    found = peer.tokens_until_end(1, 2, 3, 4)
    for request in made:
        assert found[request.id] == expected(request, 6)
    assert running.num_live == 0


def test_when_the_other_process_goes_its_requests_go_too(running: Running) -> None:
    """Red when a killed API process leaves its requests running, or the engine waits for it."""
    running.runner.step_s = 0.01
    peer = running.connect()
    for i in range(1, 7):
        peer.submit(10 * i, [1, 2, 3], 50, n=2 if i == 3 else 1)
    wait(lambda: running.num_live > 0)
    peer.socket.close()
    wait(lambda: running.num_live == 0 and not running.case.core.has_work)
    assert running.process._requests == {}
    running.runner.step_s = 0.0
    other = running.connect()
    request = other.submit(20, [1, 2], 5)
    assert other.tokens_until_end(20)[20] == expected(request, 5)


def test_an_abort_takes_effect_within_two_steps(running: Running) -> None:
    running.runner.step_s = 0.02
    peer = running.connect()
    peer.submit(1, [1, 2, 3], 50)
    wait(lambda: running.num_live > 0)
    steps = len(running.case.plans)
    peer.say(msg.Abort([1]))
    wait(lambda: running.num_live == 0)
    assert len(running.case.plans) - steps <= 2


@pytest.mark.parametrize(
    "junk", [b"\x03\x00\x00\x00\x01abc", b"\xff\xff\xff\xff\x01", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_junk_costs_the_connection_not_the_engine(running: Running, junk: bytes) -> None:
    peer = running.connect()
    peer.submit(1, [1, 2], 60)
    peer.socket.sendall(junk)
    wait(lambda: not running.process._peers)
    assert running.num_live == 0
    again = running.connect()
    again.submit(5, [1], 3)
    assert len(again.tokens_until_end(5)[5]) == 3


def test_ids_outside_the_vocabulary_are_refused_alone(running: Running) -> None:
    peer = running.connect()
    peer.submit(1, [1, 700], 3)
    assert "outside" in (peer.error_of(1) or "")
    peer.submit(2, [1, 6], 3)
    assert len(peer.tokens_until_end(2)[2]) == 3


def test_waiting_too_long_to_start_ends(running: Running) -> None:
    """Red when a request may wait for ever behind others."""
    running.runner.step_s = 0.05
    peer = running.connect()
    for i in (1, 2):
        peer.submit(i, [1], 50)
    peer.submit(3, [1], 5)
    assert peer.error_of(3) == msg.QUEUE_TIMEOUT
    peer.say(msg.Abort([1, 2]))
    wait(lambda: running.num_live == 0)


@pytest.mark.parametrize("for_what", ["an adapter", "a grammar"])
def test_waiting_too_long_for_something_else_ends(
    for_what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when only the scheduler's line is looked at."""
    running = Running(tmp_path, runs=False)
    core = running.case.core
    core.adapters = shelved(Shelf(), 1)
    for name in "ab":
        core.adapters.load(name, f"/{name}")
    compiler: Any = SimpleNamespace(compile=lambda params: time.sleep(2))
    core.grammars = GrammarQueue(compiler, LiveMatchers())
    running.runner.step_s = 0.05
    threading.Thread(target=running.process.run, daemon=True).start()
    peer = running.connect()
    peer.submit(1, [1], 50, adapter="a")
    if for_what == "an adapter":
        peer.submit(2, [1], 5, n=2, adapter="b")
    else:
        peer.submit(2, [1], 5, n=2, structured_outputs=StructuredOutputsParams(regex="a"))
    errors = {id: peer.error_of(id) for id in (2, 3)}
    assert set(errors.values()) == {msg.QUEUE_TIMEOUT}
    peer.say(msg.Abort([1]))
    wait(lambda: running.num_live == 0 and not core.has_work)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_pause_ends_with_the_connection(running: Running, is_early: bool) -> None:
    """Red when an API process that paused the engine and died leaves it paused, also where the next
    one is there before the engine notices."""
    peer = running.connect()
    peer.say(msg.Pause(1))
    while not isinstance(peer.next(), msg.Reply):
        pass
    peer.submit(1, [1], 3)
    early = running.connect() if is_early else None
    peer.socket.close()
    other = early or running.connect()
    other.submit(2, [1], 3)
    assert len(other.tokens_until_end(2)[2]) == 3


def reply_to(peer: Connected) -> msg.Reply:
    while not isinstance(report := peer.next(), msg.Reply):
        pass
    return report


def test_a_profile_waits_for_no_step_that_does_not_come(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when an idle or paused engine, or one whose work ends, keeps an operator waiting."""
    monkeypatch.chdir(tmp_path)
    peer = running.connect()
    peer.say(msg.Profile(1, 5))
    assert "idle" in (reply_to(peer).error or "")
    running.runner.step_s = 0.005
    peer.submit(1, [1, 2], 20)
    peer.say(msg.Profile(2, 3))
    found = reply_to(peer).value
    assert isinstance(found, dict) and found["num_steps"] == 3
    assert (tmp_path / str(found["trace"])).stat().st_size > 0
    peer.say(msg.Profile(3, 1_000))
    found = reply_to(peer).value
    assert isinstance(found, dict) and 0 < int(found["num_steps"]) < 20, "until the work ended"
    peer.say(msg.Pause(4))
    assert reply_to(peer).error is None
    peer.submit(2, [1, 2], 3)
    peer.say(msg.Profile(5, 1))
    assert "paused" in (reply_to(peer).error or "")


def test_a_peer_that_does_not_read_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when reports for a stopped API process pile up without end, or hold a step."""
    monkeypatch.setattr(peer_module, "MAX_UNSENT", 1 << 20)
    left, right = socket.socketpair()
    peer = Peer(left, lambda: None, 0)
    begun = time.monotonic()
    report = msg.Snapshot({"filler": "x" * 100_000})
    for _ in range(100):
        peer.send(report)
    assert peer.is_gone and time.monotonic() - begun < 5
    right.close()


def test_what_was_sent_is_counted_exactly() -> None:
    """Red when two threads that send at once lose count, and a good peer is taken for slow."""
    left, right = socket.socketpair()
    peer = Peer(left, lambda: None, 0)
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: right.recv(65536), b"")])
    drain.start()
    beat = msg.Beat({"a": 1.0}, False, False, 0.0)
    senders = [
        threading.Thread(target=lambda: [peer.send(beat) for _ in range(3_000)]) for _ in range(3)
    ]
    for thread in senders:
        thread.start()
    for thread in senders:
        thread.join()
    wait(lambda: peer._unsent == 0)
    peer.close()
    drain.join(5)
    right.close()


def test_a_slow_reader_gets_all_frames_in_order() -> None:
    """Red when a frame overtakes the rest of one that the socket had no room for."""
    left, right = socket.socketpair()
    peer, codec = Peer(left, lambda: None, 0), Codec[msg.Report](msg.Report)
    padding = {f"{i}": 0.0 for i in range(3000)}
    seen: list[float] = []

    def read() -> None:
        while len(seen) < 300 and (body := receive(right)) is not None:
            report = codec.decode(body)
            assert isinstance(report, msg.Beat)
            seen.append(report.stalled_s)
            time.sleep(0.002 if len(seen) % 50 == 0 else 0.0)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        peer.send(msg.Beat(padding if number % 3 == 0 else {}, False, False, float(number)))
    reader.join(10)
    assert seen == list(map(float, range(300)))
    peer.close()
    right.close()


HANGS = """
import sys, time, threading
from pathlib import Path
from types import SimpleNamespace
from quire.engine import process
from quire.engine.process import EngineProcess, Patience
from tests.lora.shelf import Shelf, shelved
from tests.unit.case import Case

process.BEAT_S = 0.05
case = Case()
class Hangs:
    def execute(self, plan):
        {how}
case.core.runner = Hangs()
spec = SimpleNamespace(vocab_size=7)
engine = SimpleNamespace(core=case.core, spec=spec, config=None, group=None, tiers=None)
engine.parking = None
case.add([1, 2, 3])
EngineProcess(engine, Path(sys.argv[1]), 0.0, Patience(0.2, 0.5, 60.0)).run()
"""


def test_a_step_that_never_returns_ends_the_process(tmp_path: Path) -> None:
    """Red when a hung kernel hangs the server: stacks are printed, then the process gives up."""
    code = HANGS.format(how="time.sleep(60)")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "e.sock")],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=ROOT,
    )
    assert done.returncode == STUCK, done.stderr
    assert "in execute" in done.stderr  # where it hangs
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("is_overdue", [False, True])
def test_a_check_gives_way_unless_overdue(
    is_overdue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Running(tmp_path, runs=False).process
    idle, seen = process._idle, list[int]()

    def check_with_company(_: object) -> Iterator[None]:
        for number in range(3):
            seen.append(number)
            process._wake.set()
            yield

    monkeypatch.setattr(idle_module, "check_in_slices", check_with_company)
    late = idle_module.CHECK_LATEST_S + 1 if is_overdue else 0.0
    idle.next_check = due = time.monotonic() - late
    idle.check_pages()
    assert len(seen) == (3 if is_overdue else 1)
    assert (idle.next_check > due) == is_overdue


# ------------------------------------------------------------ several API processes


def test_each_hears_of_its_own_requests_alone(running: Running) -> None:
    """Red when ids of two API processes collide, or news go to whoever connected last."""
    one, two = running.connect(), running.connect()
    assert (one.first_id, two.first_id) == (0, 1 << ID_BITS)
    running.runner.step_s = 0.01
    mine, yours = one.submit(1, [1, 2, 3], 8), two.submit(1, [4, 5], 6)
    assert one.tokens_until_end(1)[1] == expected(mine, 8)
    assert two.tokens_until_end(1)[1] == expected(yours, 6)


def test_one_dies_and_the_other_goes_on(running: Running) -> None:
    """Red when a lost API process takes the requests of the others with it, or leaves its own."""
    one, two = running.connect(), running.connect()
    running.runner.step_s = 0.02
    one.submit(1, [1, 2, 3], 50)
    stays = two.submit(1, [4, 5], 20)
    wait(lambda: len(running.case.scheduler.running) == 2)
    one.socket.close()
    wait(lambda: len(running.case.scheduler.running) == 1)
    assert two.tokens_until_end(1)[1] == expected(stays, 20)
    assert list(running.process._peers) == [1]
    three = running.connect()
    assert three.first_id == 2 << ID_BITS


def test_an_id_of_somebody_else_costs_the_connection(running: Running) -> None:
    one, two = running.connect(), running.connect()
    two.first_id = 0
    two.submit(1, [1, 2], 3)
    wait(lambda: list(running.process._peers) == [0])
    one.submit(2, [1], 3)
    assert len(one.tokens_until_end(2)[2]) == 3


def test_everyone_hears_of_a_pause(running: Running) -> None:
    """Red when only the API process that was asked knows, and /ready depends on who answers."""
    one, two = running.connect(), running.connect()
    one.say(msg.Pause(1))
    while not (isinstance(beat := two.next(), msg.Beat) and beat.is_paused):
        pass
    two.say(msg.Resume(1))
    while not (isinstance(beat := one.next(), msg.Beat) and not beat.is_paused):
        pass


def test_adapters_come_and_go(tmp_path: Path) -> None:
    """Red when one API process does not hear of what another loaded, or a bad folder ends it."""
    running = Running(tmp_path, runs=False, max_num_seqs=2)
    known = running.case.core.adapters = shelved(Shelf(), 2)
    running.process._adapters._adapters = known
    threading.Thread(target=running.process.run, daemon=True).start()
    one, two = running.connect(), running.connect()
    wait(lambda: len(running.process._peers) == 2)

    def answer(command: msg.Command) -> tuple[list[str], str | None]:
        one.say(command)
        names: list[str] = []
        while not isinstance(report := one.next(), msg.Reply):
            if isinstance(report, msg.AdapterList):
                names = [info.name for info in report.adapters]
        return names, report.error

    assert answer(msg.LoadAdapter(1, "sql", "/good")) == (["sql"], None)
    names, error = answer(msg.LoadAdapter(2, "x", "/broken"))
    assert names == ["sql"] and "no folder /broken" in (error or "")
    while not isinstance(report := two.next(), msg.AdapterList):
        pass
    assert report.adapters == [msg.AdapterInfo("sql", "/good", 4, 100, b"/good")]
    late = running.connect()
    assert late.hello.adapters == report.adapters
    assert answer(msg.UnloadAdapter(3, "sql")) == ([], None)
    request = Request.new(one.first_id + 5, [1], SamplingParams(max_tokens=2))
    request.adapter_name = "sql"
    one.say(msg.submit_of(request))
    assert one.error_of(5) == msg.ADAPTER_GONE


def test_who_comes_is_waited_for_by_nobody_else(tmp_path: Path) -> None:
    """Red when a line of a batch stops the others' step, or somebody's request does not."""
    running = Running(tmp_path, runs=False)
    urged: list[bool] = []
    urge = running.process._urge
    running.process._urge = SimpleNamespace(set=lambda: urged.append(True), clear=urge.clear)  # type: ignore[assignment]
    threading.Thread(target=running.process.run, daemon=True).start()
    one = running.connect()
    line = Request.new(one.first_id + 1, [1, 2], SamplingParams(max_tokens=2), priority=BACKGROUND)
    one.say(msg.submit_of(line))
    one.tokens_until_end(1)
    assert urged == []
    one.submit(2, [1, 2], 2)
    one.tokens_until_end(2)
    assert urged == [True]

"""The supervisor with children played by scripts: who is restarted when, and who dies with whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PARENT = """
import logging, sys
from quire.obs.log import configure_logging
from quire.server import supervisor
from quire.server.settings import ServeSettings

supervisor.FIRST_PAUSE_S, supervisor.SILENT_S, supervisor.STOP_S = 0.02, {silent_s}, 1.0
configure_logging("json", "info")
made = supervisor.Supervisor(ServeSettings(api_keys=("a-secret-key",), drain_s=20.0))
made.engine.module, made.apis[0].module = "played_engine", "played_api"
sys.exit(made.run())
"""
CHILD = """
import os, pathlib, signal, sys, time
from quire.server.lifeline import begin
from quire.server.settings import ServeSettings

settings = begin(ServeSettings, int(sys.argv[1]))
folder = pathlib.Path(settings.runtime_folder)
lives = pathlib.Path(__file__).with_name("{name}.lives")
with lives.open("a") as out:
    out.write(f"{{os.getpid()}} {{time.monotonic()}} {{folder}}\\n")
life = len(lives.read_text().splitlines())
{body}
time.sleep(60)
"""
IS_UP = "(folder / 'engine.sock').touch()\n"


class Family:
    """A supervisor process and its two played children."""

    def __init__(self, folder: Path, engine: str, api: str = "", silent_s: float = 60.0) -> None:
        self.folder = folder
        for name, body in (("engine", engine), ("api", api)):
            (folder / f"played_{name}.py").write_text(CHILD.format(name=name, body=body))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PARENT.format(silent_s=silent_s)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"},
            stderr=(folder / "log").open("w"),
        )

    def lives(self, name: str) -> list[tuple[int, float]]:
        """(pid, when it began) of each child of that name there has been."""
        path = self.folder / f"{name}.lives"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(pid), float(when)) for pid, when, _ in words]

    def pid(self, name: str) -> int:
        return self.lives(name)[-1][0]

    def wait_lives(self, name: str, count: int) -> None:
        wait(lambda: len(self.lives(name)) >= count, f"{count} lives of {name}; {self.log()}")

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def is_gone(self) -> bool:
        pids = [pid for name in ("engine", "api") for pid, _ in self.lives(name)]
        return not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait(is_so: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    made: list[Family] = []

    def make(*args: str, hang_up: signal.Handlers = signal.SIG_DFL, **options: float) -> Family:
        before = signal.signal(signal.SIGHUP, hang_up)  # inherited; tests may run under nohup
        try:
            made.append(Family(tmp_path, *args, **options))  # type: ignore[arg-type]
        finally:
            signal.signal(signal.SIGHUP, before)
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.wait()


def test_a_users_mistake_is_final(family: Callable[..., Family]) -> None:
    """Red when a wrong model is tried again and again, or its exit code is lost."""
    made = family("print('error: no such model', file=sys.stderr); sys.exit(2)")
    assert made.process.wait(15) == 2
    assert len(made.lives("engine")) == 1 and made.is_gone()


def test_an_engine_killed_while_it_loads_is_reported(family: Callable[..., Family]) -> None:
    made = family("os.kill(os.getpid(), signal.SIGKILL)")
    assert made.process.wait(15) == 1
    assert '"engine_did_not_start"' in made.log() and made.is_gone()


def test_an_engine_that_crashes_is_restarted_with_growing_pauses_and_given_up(
    family: Callable[..., Family],
) -> None:
    """Red when a crashing engine is restarted for ever, at once, or not at all."""
    made = family(IS_UP + "time.sleep(0.1); os._exit(1)")
    assert made.process.wait(30) == 1
    assert len(made.lives("engine")) == 6
    pauses = [
        float(line.split('"restart_in_s": ')[1].rstrip("}"))
        for line in made.log().splitlines()
        if '"child_ended"' in line
    ]
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32]
    assert '"gave_up"' in made.log() and made.is_gone()
    assert len(made.lives("api")) == 1  # it went on all the while


def test_no_memory_after_a_crash_is_no_users_mistake(family: Callable[..., Family]) -> None:
    """Red when the server ends because the dead engine's memory was not free yet."""
    made = family("if life == 2: sys.exit(2)\n" + IS_UP + "if life == 1: os._exit(9)")
    made.wait_lives("engine", 3)
    time.sleep(0.2)
    assert made.process.poll() is None and is_alive(made.pid("engine"))


def test_the_api_process_is_restarted_and_the_engine_left_alone(
    family: Callable[..., Family],
) -> None:
    made = family(IS_UP)
    made.wait_lives("api", 1)
    made.wait_lives("engine", 1)
    engine = made.pid("engine")
    killed = time.monotonic()
    os.kill(made.pid("api"), signal.SIGKILL)
    made.wait_lives("api", 2)
    assert made.lives("api")[-1][1] - killed < 2.0
    assert made.pid("engine") == engine and is_alive(engine)


def test_a_child_that_stops_beating_is_replaced(family: Callable[..., Family]) -> None:
    """Red when a process stopped in its tracks counts as alive for ever."""
    made = family(IS_UP, silent_s=2.5)
    made.wait_lives("engine", 1)
    time.sleep(0.3)
    os.kill(made.pid("engine"), signal.SIGSTOP)
    made.wait_lives("engine", 2)
    assert '"child_silent"' in made.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_waits_for_the_api_process(
    family: Callable[..., Family], number: signal.Signals
) -> None:
    """Red when the engine goes before the requests that need it are done."""
    finishes = (
        "def finish(*_):\n"
        "    time.sleep(0.7)\n"
        "    os._exit(0 if os.path.exists(f'/proc/{engine}') else 3)\n"
        "signal.signal(signal.SIGTERM, finish)\n"
        "other = lives.with_name('engine.lives')\n"
        "while not other.exists(): time.sleep(0.01)\n"
        "engine = int(other.read_text().split()[0])\n"
        "lives.with_name('ready').touch()\n"
    )
    made = family(IS_UP, finishes)
    wait(lambda: (made.folder / "ready").exists(), "ready")
    runtime = Path((made.folder / "api.lives").read_text().split()[2])
    assert runtime.is_dir() and runtime.stat().st_mode & 0o777 == 0o700
    made.process.send_signal(number)
    begun = time.monotonic()
    assert made.process.wait(15) == 0
    assert time.monotonic() - begun > 0.6
    assert made.is_gone() and not runtime.exists()


def test_a_second_sigterm_does_not_wait(family: Callable[..., Family]) -> None:
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN); lives.with_name('ready').touch()"
    made = family(IS_UP, ignores)
    wait(lambda: (made.folder / "ready").exists(), "ready")
    made.process.send_signal(signal.SIGTERM)
    time.sleep(0.02)  # before or after the first was noticed
    made.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert made.process.wait(15) == 0
    assert time.monotonic() - begun < 4.0 and made.is_gone()


def test_sigterm_while_loading_leaves_nobody(family: Callable[..., Family]) -> None:
    made = family("")
    made.wait_lives("engine", 1)
    made.wait_lives("api", 1)
    made.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert made.process.wait(15) == 0
    assert time.monotonic() - begun < 4.0 and made.is_gone()


def test_children_leave_a_hang_up_to_their_parent(family: Callable[..., Family]) -> None:
    """Red when SIGHUP to everybody ends the engine that the drain still needs."""
    made = family(IS_UP)
    for name in ("engine", "api"):
        made.wait_lives(name, 1)
        os.kill(made.pid(name), signal.SIGHUP)
    time.sleep(0.3)
    assert len(made.lives("engine")) == len(made.lives("api")) == 1
    assert is_alive(made.pid("engine")) and is_alive(made.pid("api"))


def test_nohup_means_no_hang_up(family: Callable[..., Family]) -> None:
    """Red when `nohup quire serve` ends with its terminal all the same."""
    made = family(IS_UP, hang_up=signal.SIG_IGN)
    made.wait_lives("engine", 1)
    made.process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert made.process.poll() is None and '"draining"' not in made.log()


def test_children_die_with_a_killed_supervisor(family: Callable[..., Family]) -> None:
    """Red when kill -9 leaves processes that hold a port and a GPU, even one that catches all."""
    stubborn = "for n in (1, 2, 13, 15): signal.signal(n, signal.SIG_IGN)\n"
    made = family(IS_UP + stubborn, stubborn)
    made.wait_lives("engine", 1)
    made.wait_lives("api", 1)
    time.sleep(0.2)
    made.process.kill()
    wait(made.is_gone, "children gone", seconds=2.0)


def test_secrets_are_not_on_command_lines(family: Callable[..., Family]) -> None:
    made = family(IS_UP)
    for name in ("engine", "api"):
        made.wait_lives(name, 1)
        child = psutil.Process(made.pid(name))
        assert "a-secret-key" not in " ".join(child.cmdline())
        assert "a-secret-key" not in str(child.environ())

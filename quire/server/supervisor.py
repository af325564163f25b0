"""Supervisor: a few children and the rules of their lives. It imports nothing heavy, serves nobody.

    supervisor ── api      HTTP, text; one or several on one port; restarted at once
               └─ engine   the model; restarted with growing pauses, given up after too many crashes
                           (of several models one each, which come and go: `fleet.py`)

Children die with this process (see `lifeline.py`). SIGTERM drains: the API processes finish what
they have and exit, then the engine goes, then we do, with 0. A second SIGTERM does not wait. Ctrl-C
and a terminal that is closed (SIGHUP) mean the same; under nohup the latter means nothing.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import msgspec

from quire.obs.log import log_event
from quire.server.board import SharedBoard
from quire.server.child import Child
from quire.server.fleet import Fleet
from quire.server.keys import KeyRing
from quire.server.settings import ServeSettings

TICK_S = 0.05
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
MAX_CRASHES = 5
SILENT_S = 60.0  # a child that has not beaten for this long is taken for dead
STOP_S = 5.0
BAD_INPUT, FAILED = 2, 1


class Supervisor:
    def __init__(self, settings: ServeSettings) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-")  # 0700
        settings = replace(settings, runtime_folder=self._folder.name)
        self.settings = settings
        self.engine = Child("engine", "quire.server.engine_main")
        self.engine.settings = msgspec.json.encode(settings)
        self.apis = [Child("api", "quire.server.api_main") for _ in range(settings.api_processes)]
        for index, api in enumerate(self.apis):
            api.settings = msgspec.json.encode(replace(settings, api_index=index))
        self._board: SharedBoard | None = None
        if len(self.apis) > 1:
            salts = KeyRing(settings.api_keys, settings.admin_keys).salts
            self._board = SharedBoard(Path(self._folder.name), len(self.apis), -1, salts)
        self.fleet = Fleet(settings) if settings.models else None
        self._terms = 0
        self._was_up = False

    def run(self) -> int:
        """Until told to stop or out of hope; the exit code of the whole server."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_term)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup
            signal.signal(signal.SIGHUP, self._on_term)
        try:
            for child in self._children:
                child.start()
            while not self._terms:
                code = self._tick()
                if code is not None:
                    return code
                time.sleep(TICK_S)
            return self._drain()
        finally:
            for child in self.apis:
                child.signal(signal.SIGTERM)
            for child in (*self.apis, self.engine, *(self.fleet.children if self.fleet else ())):
                self._kill(child)
            self._folder.cleanup()

    @property
    def _children(self) -> list[Child]:
        """One engine, or as many as a fleet looks after itself."""
        return [*([] if self.fleet else [self.engine]), *self.apis]

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._terms += 1

    # ------------------------------------------------------------ alive

    def _tick(self) -> int | None:
        if self.fleet is not None:
            self.fleet.tick()
        self._was_up = self._was_up or self._marker.exists()
        for child in self._children:
            child.listen()
            if (code := child.exit_code()) is not None:
                if (verdict := self._ended(child, code)) is not None:
                    return verdict
            elif child.process is None:
                if time.monotonic() >= child.not_before:
                    child.start()
            elif time.monotonic() - child.beaten > SILENT_S:
                log_event("child_silent", child=child.name, seconds=SILENT_S)
                child.dump_and_kill()
        return None

    @property
    def _marker(self) -> Path:
        """The engine's socket exists once its model is loaded."""
        return Path(self._folder.name) / "engine.sock"

    def _ended(self, child: Child, code: int) -> int | None:
        child.clear()
        is_first = child is self.engine and not self._was_up
        if is_first and code not in (BAD_INPUT, FAILED):  # else it said why on stderr
            log_event("engine_did_not_start", severity=logging.ERROR, exit_code=code)
        # An engine that was up and finds no memory now will find it when its forerunner's is free.
        if is_first or (code == BAD_INPUT and child is not self.engine):
            return BAD_INPUT if code == BAD_INPUT else FAILED
        now = time.monotonic()
        if child.count_crash() > MAX_CRASHES:
            log_event(
                "gave_up",
                severity=logging.ERROR,
                child=child.name,
                crashes=len(child.crashes),
                exit_code=code,
            )
            return FAILED
        pause = min(FIRST_PAUSE_S * 2 ** (len(child.crashes) - 1), LONGEST_PAUSE_S)
        pause = pause if child is self.engine else 0.0
        child.not_before = now + pause
        if child is self.engine:
            self._marker.unlink(missing_ok=True)
        elif self._board is not None:
            self._board.clear(self.apis.index(child))
        log_event("child_ended", child=child.name, exit_code=code, restart_in_s=pause)
        return None

    # ------------------------------------------------------------ going

    def _drain(self) -> int:
        """API processes finish what they have; a second signal, or their deadline, ends that."""
        log_event("draining", seconds=self.settings.drain_s)
        for api in self.apis:
            api.signal(signal.SIGTERM)

        def is_over() -> bool:
            left = [api for api in self.apis if api.process is not None and api.exit_code() is None]
            return not left or self._terms > 1

        _wait(is_over, self.settings.drain_s + STOP_S)
        return 0  # what is still there is told again, and then killed

    def _kill(self, child: Child) -> None:
        child.signal(signal.SIGTERM)
        _wait(lambda: child.exit_code() is not None or child.process is None, STOP_S)
        child.signal(signal.SIGKILL)
        if child.process is not None:
            child.process.wait()
        child.clear()


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(TICK_S)

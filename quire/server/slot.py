"""Slot: one model of a fleet: its process, what it shall be, and what it is.

It starts and ends processes and tells them things; when, `fleet.py` decides.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.obs.log import log_event
from quire.server.child import Child
from quire.server.model_files import Home, ModelFolder, ModelState, State
from quire.server.park_line import ParkLine
from quire.server.settings import ModelSettings, ServeSettings

BESIDE_WEIGHTS = 600 << 20  # bytes of a process besides its weights, until one was measured


class Slot:
    def __init__(self, settings: ServeSettings, own: ModelSettings, folder: ModelFolder) -> None:
        self.own, self.folder = own, folder
        self.child = Child(f"engine {own.name}", "quire.server.engine_main")
        self.heir: Child | None = None  # who will be parked in its place
        self.wanted: State = "ready" if own.at_start else "unloaded"
        self.state = ModelState("loading" if own.at_start else "unloaded")
        self.was_ready = self.is_asked_for = False
        self.device = ""  # whose memory the engine can leave; empty: not known, or of none
        self.locked = 0  # bytes of the host that a copy of its weights has
        self.line: ParkLine | None = None  # on which it was told so
        self.is_away = self.is_refused = False  # it left; it has no memory of the host to leave to
        self.before: State = "ready"  # what was asked for last: it stays so where it cannot leave
        self.had_rivals = False  # others had its GPU's memory when it was last told to have some
        self.was_short = False  # it could not start while others had the GPU's memory
        self.needs = _file_bytes(own.engine.model) + BESIDE_WEIGHTS
        self._settings = replace(
            settings, engine=own.engine, runtime_folder=str(folder.path), models=(), parks=True
        )
        folder.path.mkdir(mode=0o700)
        folder.tell(self.state)

    def set(self, state: State, reason: str = "", waits_for: Sequence[str] = ()) -> None:
        told, old = ModelState(state, reason, self.memory, tuple(waits_for)), self.state
        if msgspec.structs.replace(told, memory=old.memory) != old:
            if (state, reason) != (old.state, old.reason):
                log_event("model", name=self.own.name, state=state, reason=reason)
            self.folder.tell(told)
        self.state = told

    @property
    def memory(self) -> int:
        """Bytes that its processes have in memory; 0 where the system does not tell."""
        return self.locked + _memory_of(self.child) + (_memory_of(self.heir) if self.heir else 0)

    @property
    def takes(self) -> int:
        """What to count with: all it needs, while it is being loaded."""
        if self.child.process is None:
            return 0
        return self.memory if self.was_ready or self.folder.is_parked else self.needs

    def start(self, is_parked: bool) -> None:
        self.forget()
        self.folder.clear()
        self.folder.touch()
        self.child.settings = self._told(is_parked)
        self.child.start()
        self.was_ready = False

    def _told(self, is_parked: bool) -> bytes:
        return msgspec.json.encode(replace(self._settings, is_parked=is_parked))

    def stop(self) -> None:
        self.forget()
        self.disinherit()
        _end(self.child)
        self.folder.clear()

    # ------------------------------------------------------------ in place

    @property
    def can_leave(self) -> bool:
        return bool(self.folder.home.device) and not self.is_refused

    def tell(self, parks: bool) -> None:
        """Leave the GPU's memory, or come back."""
        with suppress(OSError):  # it is ending, as will be seen
            self.line = ParkLine(self.folder.socket, parks)

    def hang_up(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None

    def forget(self) -> None:
        """All that was true of an engine that is no more."""
        self.hang_up()
        self.is_away = self.is_refused = False
        self.locked = 0

    # ------------------------------------------------------------ the heir

    def beget(self) -> None:
        """Start the process that will be parked; the one there is goes on serving."""
        self.heir = Child(self.child.name, self.child.module, settings=self._told(is_parked=True))
        self.heir.start()

    def disinherit(self) -> None:
        """The model is wanted after all."""
        if self.heir is not None:
            _end(self.heir)
            self.heir = None
            self.folder.set_parked(False)

    def inherit(self) -> None:
        """The heir has imported everything: the weights may go."""
        assert self.heir is not None
        self.forget()
        self.folder.set_home(Home())
        _end(self.child)
        self.folder.socket.unlink(missing_ok=True)
        self.heir.crashes = self.child.crashes
        self.child, self.heir, self.was_ready = self.heir, None, False


def _end(child: Child) -> None:
    child.signal(signal.SIGKILL)
    if child.process is not None:
        child.process.wait()
    child.clear()


def _memory_of(child: Child) -> int:
    if child.process is None:
        return 0
    with suppress(OSError, ValueError, IndexError):
        pages = Path(f"/proc/{child.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _file_bytes(model: str) -> int:
    path = Path(model)
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    with suppress(OSError):
        return sum(file.stat().st_size for file in files)
    return 0

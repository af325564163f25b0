"""Fleet: an engine process for each of several models, started, parked and stopped one by one.

A model is loaded at start or when a request names it. One that nobody has named for a while is
parked: a process without weights, its heir, is started beside it and takes its place once it has
imported everything; who comes before that finds the model ready. Where memory is short, whoever was
idle longest makes room. A model that fails to load is marked so, with the reason; the others never
notice. `supervisor.py` calls `tick`; wishes come through `model_files.py`.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.obs.log import log_event
from quire.server.child import Child
from quire.server.model_files import ModelFolder, ModelState, State, folder_of
from quire.server.settings import ModelSettings, ServeSettings

SILENT_S = 60.0
FIRST_PAUSE_S, MAX_CRASHES = 0.25, 5
BUSY_S = 3.0  # a model with requests is touched every second
BESIDE_WEIGHTS = 600 << 20  # bytes of a process besides its weights, until one was measured
BAD_INPUT, FAILED = 2, 1


class Slot:
    """One model: its process, what it shall be, and what it is."""

    def __init__(self, settings: ServeSettings, own: ModelSettings, folder: ModelFolder) -> None:
        self.own, self.folder = own, folder
        self.child = Child(f"engine {own.name}", "quire.server.engine_main")
        self.heir: Child | None = None  # who will be parked in its place
        self.wanted: State = "ready" if own.at_start else "unloaded"
        self.state = ModelState("loading" if own.at_start else "unloaded")
        self.was_ready = self.is_asked_for = False
        self.needs = _file_bytes(own.engine.model) + BESIDE_WEIGHTS
        self._settings = replace(
            settings, engine=own.engine, runtime_folder=str(folder.path), models=()
        )
        folder.path.mkdir(mode=0o700)
        folder.tell(self.state)

    def set(self, state: State, reason: str = "") -> None:
        told = ModelState(state, reason, self.memory)
        if (told.state, told.reason) != (self.state.state, self.state.reason):
            log_event("model", name=self.own.name, state=state, reason=reason)
            self.folder.tell(told)
        self.state = told

    @property
    def memory(self) -> int:
        """Bytes that its processes have in memory; 0 where the system does not tell."""
        return _memory_of(self.child) + (_memory_of(self.heir) if self.heir else 0)

    @property
    def takes(self) -> int:
        """What to count with: all it needs, while it is being loaded."""
        if self.child.process is None:
            return 0
        return self.memory if self.was_ready or self.folder.is_parked else self.needs

    def start(self, is_parked: bool) -> None:
        self.folder.clear()
        self.folder.touch()
        self.child.settings = self._told(is_parked)
        self.child.start()
        self.was_ready = False

    def _told(self, is_parked: bool) -> bytes:
        return msgspec.json.encode(replace(self._settings, is_parked=is_parked))

    def stop(self) -> None:
        self.disinherit()
        _end(self.child)
        self.folder.clear()

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
        _end(self.child)
        self.folder.socket.unlink(missing_ok=True)
        self.heir.crashes = self.child.crashes
        self.child, self.heir, self.was_ready = self.heir, None, False


class Fleet:
    def __init__(self, settings: ServeSettings) -> None:
        self.memory = settings.memory
        self.slots = [
            Slot(settings, own, folder_of(settings, index))
            for index, own in enumerate(settings.models)
        ]

    @property
    def children(self) -> list[Child]:
        return [child for slot in self.slots for child in (slot.child, slot.heir) if child]

    def tick(self) -> None:
        for slot in self.slots:
            slot.child.listen()
            self._hear(slot)
            if (code := slot.child.exit_code()) is not None:
                self._ended(slot, code)
            elif slot.child.process is None:
                self._rest(slot)
            elif time.monotonic() - slot.child.beaten > SILENT_S:
                log_event("child_silent", child=slot.child.name, seconds=SILENT_S)
                slot.child.dump_and_kill()
            else:
                self._look(slot)

    # ------------------------------------------------------------ one model

    def _hear(self, slot: Slot) -> None:
        wish = slot.folder.take_wish()
        if wish is None:
            return
        goals: dict[str, State] = {"load": "ready", "park": "parked", "unload": "unloaded"}
        slot.wanted, slot.child.not_before, slot.is_asked_for = goals[wish], 0.0, wish == "load"
        if slot.state.state == "failed":
            slot.child.crashes.clear()
            slot.set("unloaded")

    def _rest(self, slot: Slot) -> None:
        """There is no process."""
        if slot.state.state == "failed":
            return
        if slot.wanted == "unloaded":
            slot.set("unloaded")
        elif time.monotonic() >= slot.child.not_before and self._has_room(slot):
            slot.set("loading")
            slot.start(is_parked=slot.wanted == "parked")

    def _look(self, slot: Slot) -> None:
        """There is one: is it what it shall be?"""
        if slot.folder.socket.exists():
            if not slot.was_ready:
                slot.was_ready, slot.needs = True, slot.memory or slot.needs
                slot.folder.touch()  # idle time counts from here
            slot.set("ready")
            self._send_away(slot)
        elif slot.folder.is_parked:
            slot.set("parked")
            if slot.wanted == "unloaded":
                slot.stop()
            elif slot.wanted == "ready" and self._has_room(slot):
                slot.folder.set_parked(False)
                slot.folder.touch()
                slot.child.signal(signal.SIGUSR2)
        elif slot.wanted == "ready" or slot.state.state == "loading":
            slot.set("loading")

    def _send_away(self, slot: Slot) -> None:
        """A model that is ready, when it is idle and shall not be, or need not be."""
        idle, limit = slot.folder.idle_s(), slot.own.park_after_s
        is_rest = slot.wanted == "ready" and limit > 0 and idle > limit
        if slot.wanted == "unloaded":
            slot.disinherit()
            if idle > BUSY_S:
                slot.stop()
                slot.set("unloaded")
        elif not is_rest and slot.wanted == "ready":
            slot.disinherit()
        elif slot.heir is not None:
            self._look_at_heir(slot, slot.heir, idle)
        elif idle > BUSY_S and self._has_room_beside():
            slot.beget()
        elif idle > BUSY_S:
            self._park_at_once(slot)

    def _look_at_heir(self, slot: Slot, heir: Child, idle: float) -> None:
        heir.listen()
        is_silent = time.monotonic() - heir.beaten > SILENT_S
        if heir.exit_code() is not None or is_silent:
            log_event("child_ended", child=heir.name, exit_code=heir.exit_code())
            self._park_at_once(slot)
        elif slot.folder.is_parked and idle > BUSY_S:
            slot.inherit()
            slot.wanted = "parked"
            slot.set("parked")

    def _park_at_once(self, slot: Slot) -> None:
        """Without an heir: who comes now waits for imports as well."""
        slot.stop()
        slot.wanted = "parked"
        slot.set("parked")
        slot.start(is_parked=True)

    def _ended(self, slot: Slot, code: int) -> None:
        """By itself: what was not meant to end."""
        reason = slot.folder.reason() or f"its engine ended with exit code {code}"
        slot.disinherit()
        slot.child.clear()
        slot.folder.clear()
        if not slot.was_ready and code in (BAD_INPUT, FAILED):  # it will not get better
            return self._give_up(slot, reason)
        count = slot.child.count_crash()
        if count > MAX_CRASHES:
            return self._give_up(slot, f"{count} crashes in a row; the last: {reason}")
        pause = FIRST_PAUSE_S * 2 ** (count - 1)
        slot.child.not_before = time.monotonic() + pause
        log_event("child_ended", child=slot.child.name, exit_code=code, restart_in_s=pause)
        return slot.set("loading", "the engine is restarting")

    def _give_up(self, slot: Slot, reason: str) -> None:
        log_event("model_failed", severity=logging.ERROR, name=slot.own.name, reason=reason)
        slot.wanted = "unloaded"
        slot.set("failed", reason)

    # ------------------------------------------------------------ memory

    def _has_room(self, slot: Slot) -> bool:
        """Whether the model may be loaded now; if not, somebody idle is told to go."""
        others = [other for other in self.slots if other is not slot]
        used = sum(other.takes for other in others)
        if not self.memory or used + slot.needs <= self.memory:
            return True
        if not any(other.child.process for other in others):
            return True  # alone: it may need less than we think
        if not slot.is_asked_for:  # nobody goes for a model that nobody named yet
            slot.wanted = "unloaded"
            return False
        idle = [other for other in others if other.child.process and self._is_idle(other)]
        if idle:
            going = max(idle, key=lambda other: other.folder.idle_s())
            log_event("model_makes_room", name=going.own.name, for_model=slot.own.name)
            going.wanted = "unloaded"
        slot.set("loading", "waits for memory that other models have")
        return False

    def _has_room_beside(self) -> bool:
        """Whether an heir may import while the weights are still there."""
        used = sum(other.takes for other in self.slots)
        return not self.memory or used + BESIDE_WEIGHTS <= self.memory

    def _is_idle(self, slot: Slot) -> bool:
        return slot.state.state == "parked" or (
            slot.state.state == "ready" and slot.folder.idle_s() > BUSY_S
        )


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

"""Fleet: an engine process for each of several models, started, parked and stopped one by one.

A model is loaded at start or when a request names it. One that nobody has named for a while is
parked: a process without weights, its heir, is started beside it and takes its place once it has
imported everything; who comes before that finds the model ready. An engine that can leave its GPU's
memory (`engine/parking.py`) is its own heir: it is told so, and told to come back. Where memory is
short, whoever was idle longest makes room. A model that fails to load is marked so, with the
reason; the others never notice. `supervisor.py` calls `tick`; wishes come through `model_files.py`.
"""

from __future__ import annotations

import logging
import signal
import time

from quire.engine.commands import BUSY, NO_MEMORY
from quire.errors import EngineDead
from quire.obs.log import log_event
from quire.server.child import Child
from quire.server.model_files import State, folder_of
from quire.server.park_line import ParkLine
from quire.server.settings import ServeSettings
from quire.server.slot import BESIDE_WEIGHTS, Slot

SILENT_S = 60.0
FIRST_PAUSE_S, MAX_CRASHES = 0.25, 5
BUSY_S = 3.0  # a model with requests is touched every second
ANSWER_S = 120.0  # the first parking locks memory of the host, some gigabytes a second
RETRY_S = 0.1
SHORT = "waits for GPU memory that other models have"
BAD_INPUT, FAILED = 2, 1


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
        if wish == "fill":
            self._hear_batch(slot)
            return
        goals: dict[str, State] = {"load": "ready", "park": "parked", "unload": "unloaded"}
        slot.wanted = slot.before = goals[wish]
        slot.child.not_before, slot.is_asked_for = 0.0, wish == "load"
        if slot.state.state == "failed":
            slot.child.crashes.clear()
            slot.set("unloaded")

    def _hear_batch(self, slot: Slot) -> None:
        """Lines of a batch name it: it may come where nobody has to go for it. A start that was
        short of a GPU's memory is not repeated while others have some."""
        is_away = slot.state.state in ("unloaded", "parked") and slot.wanted != "ready"
        is_in_the_way = any(slot.own.name in other.state.waits_for for other in self.slots)
        if is_away and not is_in_the_way and not (slot.was_short and self._rivals(slot)):
            slot.wanted, slot.is_asked_for = "ready", False

    def _rest(self, slot: Slot) -> None:
        """There is no process."""
        if slot.state.state == "failed":
            return
        if slot.wanted == "unloaded":
            slot.set("unloaded")
        elif time.monotonic() >= slot.child.not_before and self._has_room(slot):
            is_awaited = slot.wanted == "ready" and slot.is_asked_for
            if is_awaited and slot.was_short and self._send_rival(slot, SHORT):
                return
            slot.set("loading")
            self._start(slot, is_parked=slot.wanted == "parked")

    def _start(self, slot: Slot, is_parked: bool) -> None:
        slot.had_rivals = bool(self._rivals(slot))
        slot.start(is_parked)

    def _look(self, slot: Slot) -> None:
        """There is one: is it what it shall be?"""
        if slot.folder.socket.exists():
            if not slot.was_ready:
                slot.was_ready, slot.needs = True, slot.memory or slot.needs
                slot.was_short = False  # others may come and go before it is started again
                slot.folder.touch()  # idle time counts from here
                slot.device = slot.folder.home.device
            if slot.can_leave:
                self._look_at_home(slot)
            else:
                slot.set("ready")
                self._send_away(slot)
        elif slot.folder.is_parked:
            if slot.wanted != "ready":  # else it may be waiting for room, which is told there
                slot.set("parked")
            if slot.wanted == "unloaded":
                slot.stop()
            elif slot.wanted == "ready" and self._has_room(slot):
                slot.folder.set_parked(False)
                slot.folder.touch()
                slot.had_rivals = bool(self._rivals(slot))
                slot.child.signal(signal.SIGUSR2)
        elif slot.wanted == "ready" or slot.state.state == "loading":
            slot.set("loading")

    # ------------------------------------------------------------ parking in place

    def _look_at_home(self, slot: Slot) -> None:
        """An engine that can leave its GPU's memory, or has left it."""
        is_idle = slot.folder.rest_s() > BUSY_S
        if slot.line is not None:
            self._hear_line(slot, slot.line)
        elif slot.wanted == "unloaded" and (slot.is_away or is_idle):
            slot.stop()
            slot.set("unloaded")
        elif slot.is_away and slot.wanted == "ready":
            if time.monotonic() >= slot.child.not_before and self._has_room(slot):
                slot.had_rivals = bool(self._rivals(slot))
                slot.tell(parks=False)
                slot.set("loading", slot.state.reason, slot.state.waits_for)
        elif slot.is_away:
            slot.set("parked")
        else:
            slot.set("ready")
            if is_idle and (slot.wanted == "parked" or self._is_rest(slot)):
                self._have_leave(slot)

    def _have_leave(self, slot: Slot) -> None:
        """In place, where a copy of the weights may stay on the host."""
        slot.wanted = "parked"
        copy = 0 if slot.locked else slot.folder.home.weight_bytes
        if self.memory and sum(one.takes for one in self.slots) + copy > self.memory:
            self._refuse(slot, f"a copy of its weights takes {copy:,} bytes more than --memory has")
        else:
            slot.tell(parks=True)

    def _hear_line(self, slot: Slot, line: ParkLine) -> None:
        try:
            reply = line.poll()
        except (OSError, EngineDead):  # if it has ended, that is seen; else it is told again
            return slot.hang_up()
        if reply is None:
            if time.monotonic() - line.since > ANSWER_S:
                log_event("child_silent", child=slot.child.name, seconds=ANSWER_S)
                slot.child.dump_and_kill()
                slot.hang_up()
            return None
        slot.hang_up()
        if reply.error is None:
            slot.is_away = line.parks
            slot.locked = reply.value if isinstance(reply.value, int) else 0
            if not line.parks:
                slot.folder.touch()
            slot.set("parked" if slot.is_away else "ready")
        elif line.parks:
            self._stays(slot, reply.error)
        else:
            self._cannot_return(slot, reply.error)
        return None

    def _stays(self, slot: Slot, error: str) -> None:
        """It was told to leave, and did not."""
        if slot.wanted == "parked":
            slot.wanted = slot.before
        if error != BUSY:
            self._refuse(slot, error)

    def _refuse(self, slot: Slot, reason: str) -> None:
        log_event("model_parks_by_heir", name=slot.own.name, reason=reason)
        slot.is_refused = True

    def _cannot_return(self, slot: Slot, error: str) -> None:
        """Others have its memory. Where those are no models of ours, nor were when it was told, it
        is started anew with what there is; that says what is wrong if it is not enough."""
        slot.child.not_before = time.monotonic() + RETRY_S
        if not slot.is_asked_for:  # for a batch: it stays away until somebody leaves
            slot.wanted = "parked"
            return slot.set("parked")
        is_waiting = self._send_rival(slot, f"{SHORT}: {error.removeprefix(NO_MEMORY)}")
        if not is_waiting and not slot.had_rivals:
            log_event("model_starts_anew", name=slot.own.name, reason=error)
            slot.stop()
            self._start(slot, is_parked=False)
        return None

    def _send_rival(self, slot: Slot, reason: str) -> bool:
        """Have whoever was idle longest leave the GPU that this model needs; whether there is
        anybody who could."""
        rivals = self._rivals(slot)
        if rivals:
            slot.set("loading", reason, [other.own.name for other in rivals])
        idle = [other for other in rivals if other.line is None and self._is_idle(other)]
        if idle and not any(self._is_going(other) for other in rivals):
            going = max(idle, key=lambda other: other.folder.idle_s())
            log_event("model_makes_room", name=going.own.name, for_model=slot.own.name)
            going.wanted = "parked"
        return bool(rivals)

    def _is_going(self, slot: Slot) -> bool:
        """Whether it is about to leave: one that was told to and works again may take long."""
        if slot.line is not None:
            return slot.line.parks
        return slot.wanted == "parked" and self._is_idle(slot)

    def _rivals(self, slot: Slot) -> list[Slot]:
        others = [other for other in self.slots if other is not slot]
        return [other for other in others if self._is_rival(other, slot)]

    def _is_rival(self, other: Slot, slot: Slot) -> bool:
        """Whether it has memory of the same GPU, or may be about to have some."""
        if other.child.process is None:
            return False
        if not other.was_ready:
            return not other.folder.is_parked
        if other.is_away and other.line is None:  # with one, it is coming back
            return False
        return other.device != "" and slot.device in ("", other.device)

    def _is_rest(self, slot: Slot) -> bool:
        """Whether nobody has named it for as long as it was to stay."""
        limit = slot.own.park_after_s
        return slot.wanted == "ready" and 0 < limit < slot.folder.rest_s()

    # ------------------------------------------------------------ parking by an heir

    def _send_away(self, slot: Slot) -> None:
        """A model that is ready, when it is idle and shall not be, or need not be."""
        idle, is_rest = slot.folder.rest_s(), self._is_rest(slot)
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
        was_short = slot.folder.was_short
        slot.forget()
        slot.disinherit()
        slot.child.clear()
        slot.folder.clear()
        if not slot.was_ready and code in (BAD_INPUT, FAILED):  # it will not get better
            if was_short and self._may_try_again(slot):
                return None
            return self._give_up(slot, reason)
        count = slot.child.count_crash()
        if count > MAX_CRASHES:
            return self._give_up(slot, f"{count} crashes in a row; the last: {reason}")
        pause = FIRST_PAUSE_S * 2 ** (count - 1)
        slot.child.not_before = time.monotonic() + pause
        log_event("child_ended", child=slot.child.name, exit_code=code, restart_in_s=pause)
        return slot.set("loading", "the engine is restarting")

    def _may_try_again(self, slot: Slot) -> bool:
        """A start that found too little memory on the GPU: whether others can leave some, or have
        since it began. Only for a model that somebody named does anybody go."""
        slot.was_short = True
        if slot.is_asked_for:
            return self._send_rival(slot, SHORT) or slot.had_rivals
        slot.wanted = "unloaded"
        return bool(self._rivals(slot)) or slot.had_rivals

    def _give_up(self, slot: Slot, reason: str) -> None:
        log_event("model_failed", severity=logging.ERROR, name=slot.own.name, reason=reason)
        slot.wanted = "unloaded"
        slot.set("failed", reason)

    # ------------------------------------------------------------ memory

    def _has_room(self, slot: Slot) -> bool:
        """Whether the model may be loaded now; if not, somebody idle is told to go."""
        others = [other for other in self.slots if other is not slot]
        used = sum(other.takes for other in others)
        if not self.memory or used + max(slot.needs, slot.takes) <= self.memory:
            return True
        if not any(other.child.process for other in others):
            return True  # alone: it may need less than we think
        if not slot.is_asked_for:  # nobody goes for a model that nobody named yet
            slot.wanted = "parked" if slot.child.process else "unloaded"
            return False
        idle = [other for other in others if other.child.process and self._is_idle(other)]
        if idle:
            going = max(idle, key=lambda other: other.folder.idle_s())
            log_event("model_makes_room", name=going.own.name, for_model=slot.own.name)
            going.wanted = "unloaded"
        names = [other.own.name for other in others if other.child.process]
        slot.set("loading", "waits for memory that other models have", names)
        return False

    def _has_room_beside(self) -> bool:
        """Whether an heir may import while the weights are still there."""
        used = sum(other.takes for other in self.slots)
        return not self.memory or used + BESIDE_WEIGHTS <= self.memory

    def _is_idle(self, slot: Slot) -> bool:
        return slot.state.state == "parked" or (
            slot.state.state == "ready" and slot.folder.idle_s() > BUSY_S
        )

"""Adapters: which there are by name, who uses them, and which of them have slots in memory.

At most `num_slots` do. The one that nobody has used for longest makes room; a copy stays in memory
of the host (`host_room.py`), or it is read again when a request names it. One in use stays, so a
request whose adapter finds no slot waits in a line, in the order of the scheduler's. The background
is sent back to that line when somebody needs its slot. Unloading takes the name away at once; the
weights go with their last request. No tensors: `bank.py` holds them. All methods are for the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from quire.errors import BadRequest, CheckpointError, Overloaded, QuireError
from quire.lora.host_room import HostRoom
from quire.lora.request import check_name
from quire.request import AdapterRef, Request, RequestId
from quire.sched.queue import WaitingLine
from quire.step import TokenEvent

T = TypeVar("T")
Recall = Callable[[Request], bool]  # out of the scheduler; whether the request itself was there


class Facts(NamedTuple):
    """What is known of an adapter once it was read."""

    digest: bytes
    rank: int
    num_bytes: int


class Bank(Protocol):
    def put(self, number: int, path: str) -> Facts:
        """Read a folder into a free slot. Raises CheckpointError, NotSupported or Overloaded, and
        then nothing has changed."""
        ...

    def drop(self, number: int) -> None:
        """Its slot is free again."""
        ...

    def save(self, number: int) -> None:
        """Copy one that has a slot to memory of the host."""
        ...

    def restore(self, number: int) -> None:
        """Into a free slot, from its copy, which stays. Raises Overloaded."""
        ...

    def forget(self, number: int) -> None:
        """The copy goes."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    name: str
    path: str
    ref: AdapterRef
    facts: Facts
    has_slot: bool = True
    users: dict[RequestId, Request] = field(default_factory=dict)  # past the line


class NoAdapter(BadRequest):
    """Nobody has loaded an adapter of that name, or somebody has unloaded it."""


class Adapters:
    def __init__(self, bank: Bank, num_slots: int, line: WaitingLine, host: HostRoom) -> None:
        """`line`: an empty one, that says who is next."""
        self.bank, self.num_slots = bank, num_slots
        self._line, self._host = line, host  # the line: of leaders
        self._is_stuck = False  # the first in line found no slot, and nothing has changed since
        self._named: dict[str, Entry] = {}
        self._slotted: dict[int, Entry] = {}  # by number, used longest ago first
        self._of: dict[RequestId, Entry] = {}
        self._last_number = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._line)

    def waiting(self) -> Iterator[Request]:
        return iter(self._line)

    def entries(self) -> list[Entry]:
        return list(self._named.values())

    # ------------------------------------------------------------ names

    def load(self, name: str, path: str) -> Entry:
        """Read a folder and give it a name. Again with the same path: nothing happens."""
        folder = str(Path(path).expanduser().absolute())
        if (known := self._named.get(check_name(name))) is not None:
            if known.path == folder:
                return known
            raise BadRequest(
                f"got {path!r} for the adapter {name!r}, which is {known.path}; unload that first,"
                " or give another name",
                param="lora_name",
            )
        if not self._make_room():
            raise Overloaded(
                f"all {self.num_slots} adapters that memory has room for are in use; try again"
                " later, or raise max_loras"
            )
        self._last_number += 1
        number = self._last_number
        facts = self._as_idle_ones_go(lambda: self.bank.put(number, folder))
        entry = Entry(name, folder, AdapterRef(number, facts.digest), facts)
        self._named[name] = self._slotted[number] = entry
        self._trim()
        return entry

    def unload(self, name: str) -> None:
        """Take the name away; the weights go when the last request that uses them has ended."""
        entry = self._find(name)
        del self._named[name]
        self._forget_unwanted(entry)
        self._is_stuck = False

    def _find(self, name: str) -> Entry:
        entry = self._named.get(name)
        if entry is None:
            known = ", ".join(self._named) or "none"
            raise NoAdapter(f"there is no adapter {name[:200]!r}; loaded: {known}", param="model")
        return entry

    # ------------------------------------------------------------ requests

    def bind(self, leader: Request) -> None:
        """From now on the request has the adapter that it names, whoever unloads it."""
        entry = self._find(leader.adapter_name)
        for member in (leader, *leader.children):
            member.adapter = entry.ref
            self._of[member.id] = entry

    def enter(self, leader: Request) -> None:
        """Into the line. Touches no weights: they may be away (`engine/parking.py`)."""
        self._line.push(leader)
        self._is_stuck = False

    def collect(self, add: Callable[[Request], None], recall: Recall) -> list[TokenEvent]:
        """Pass on those whose adapters find slots; returns the last events of those that failed."""
        events: list[TokenEvent] = []
        while len(self._line) and not self._is_stuck:
            leader = self._line.peek()
            try:
                self._is_stuck = not self._finds_slot(leader, recall)
            except QuireError as error:  # its folder is gone, or another one
                self._line.remove(leader)
                events += self._failed(leader, str(error))
                continue
            if not self._is_stuck:
                self._line.pop()
                add(leader)
        return events

    def _failed(self, leader: Request, error: str) -> list[TokenEvent]:
        family = (leader, *leader.children)
        for member in family:
            self.leave(member.id)
        return [TokenEvent(member.id, (), finish="error", error=error) for member in family]

    def abort(self, request_id: RequestId, reason: str) -> list[TokenEvent]:
        """End a request that waits here; its siblings stay. No event for ids that are not here."""
        for leader in self._line:
            family = [leader, *leader.children]
            rest = [member for member in family if member.id != request_id]
            if len(rest) == len(family):
                continue
            self._line.remove(leader)
            leader.children = []
            if rest:
                rest[0].children = rest[1:]
                self._line.push(rest[0])
            self._is_stuck = False
            return [TokenEvent(request_id, (), finish=reason)]
        return []

    def leave(self, request_id: RequestId) -> None:
        """A request has ended; ids that use no adapter are left alone."""
        entry = self._of.pop(request_id, None)
        if entry is not None:
            entry.users.pop(request_id, None)
            self._forget_unwanted(entry)
            self._is_stuck = False

    # ------------------------------------------------------------ slots

    def _finds_slot(self, leader: Request, recall: Recall) -> bool:
        while not self._bring(self._of[leader.id], leader):
            if leader.is_background or not self._send_back(recall):
                return False
        return True

    def _bring(self, entry: Entry, leader: Request) -> bool:
        """Into memory, for this request. False: others use all that there is room for."""
        number = entry.ref.number
        if not entry.has_slot:
            try:
                if not self._make_room():
                    return False
                self._as_idle_ones_go(lambda: self._fill(entry))
            except Overloaded:
                if not any(other.users for other in self._slotted.values()):
                    raise
                return False
            entry.has_slot, self._slotted[number] = True, entry
            self._trim()
        self._slotted[number] = self._slotted.pop(number)  # behind all others
        entry.users.update((member.id, member) for member in (leader, *leader.children))
        return True

    def _send_back(self, recall: Recall) -> bool:
        """Of the adapters that only the background uses, the one used longest ago: whether there
        was one. Its requests go back to the line, with the tokens they have."""
        for entry in self._slotted.values():
            if entry.users and all(user.is_background for user in entry.users.values()):
                users, entry.users = entry.users, {}
                for user in users.values():  # an unborn child comes back with its parent
                    if recall(user):
                        self._line.push(user)
                return True
        return False

    def _fill(self, entry: Entry) -> None:
        number = entry.ref.number
        if number in self._host:
            self.bank.restore(number)
            return
        facts = self.bank.put(number, entry.path)
        if facts.digest != entry.facts.digest:
            self.bank.drop(number)
            raise CheckpointError(
                f"{entry.path} is not what it was when the adapter {entry.name!r} was loaded;"
                " unload it and load it again"
            )

    def _as_idle_ones_go(self, do: Callable[[], T]) -> T:
        """Adapters differ in size: a GPU may be full before all slots are. Raises Overloaded when
        all that are left are in use."""
        while True:
            try:
                return do()
            except Overloaded:
                if not self._drop_idle():
                    self._trim()
                    raise
            except Exception:
                self._trim()  # those that went left copies
                raise

    def _make_room(self) -> bool:
        return len(self._slotted) < self.num_slots or self._drop_idle()

    def _drop_idle(self) -> bool:
        """The one that nobody has used for longest; whether there was one."""
        idle = next((entry for entry in self._slotted.values() if not entry.users), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _drop(self, entry: Entry) -> None:
        number, num_bytes = entry.ref.number, entry.facts.num_bytes
        if self._is_wanted(entry) and self._host.fits(num_bytes):
            if number not in self._host:
                self.bank.save(number)
            self._host.keep(number, num_bytes)
        del self._slotted[number]
        entry.has_slot = False
        self.bank.drop(number)

    def _trim(self) -> None:
        """After somebody has come, not before: it may have been its copy that is one too many."""
        for number in self._host.trim(self._slotted):
            self.bank.forget(number)

    def _is_wanted(self, entry: Entry) -> bool:
        """Whether a request may still name it, or has."""
        return self._named.get(entry.name) is entry or entry in self._of.values()

    def _forget_unwanted(self, entry: Entry) -> None:
        if self._is_wanted(entry):
            return
        if entry.has_slot:
            self._drop(entry)
        if entry.ref.number in self._host:
            self._host.forget(entry.ref.number)
            self.bank.forget(entry.ref.number)

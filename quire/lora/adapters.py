"""Adapters: which there are by name, who uses them, and which of them stay in memory.

At most `max_in_memory` do. The one that nobody has used for longest makes room, and is read again
when a request names it. One in use never goes, so a request whose adapter finds no room waits here,
and later ones behind it. Unloading takes the name away at once; the weights go with their last
request. No tensors: `bank.py` holds them. All methods are for the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.errors import BadRequest, CheckpointError, Overloaded, QuireError
from quire.lora.request import check_name
from quire.request import AdapterRef, Request, RequestId
from quire.step import TokenEvent


class Facts(NamedTuple):
    """What is known of an adapter once it was read."""

    digest: bytes
    rank: int
    num_bytes: int


class Bank(Protocol):
    def put(self, number: int, path: str) -> Facts:
        """Read a folder. Raises CheckpointError or NotSupported."""
        ...

    def drop(self, number: int) -> None: ...


@dataclass(slots=True, eq=False)
class Entry:
    name: str
    path: str
    ref: AdapterRef
    facts: Facts
    in_memory: bool = True
    users: set[RequestId] = field(default_factory=set)  # past the line


class NoAdapter(BadRequest):
    """Nobody has loaded an adapter of that name, or somebody has unloaded it."""


class Adapters:
    def __init__(self, bank: Bank, max_in_memory: int) -> None:
        self.bank, self.max_in_memory = bank, max_in_memory
        self._named: dict[str, Entry] = {}
        self._in_memory: dict[int, Entry] = {}  # by number, used longest ago first
        self._of: dict[RequestId, Entry] = {}
        self._line: deque[Request] = deque()  # leaders whose adapter found no room
        self._last_number = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._line)

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
        self._check_room()
        self._last_number += 1
        number = self._last_number
        facts = self.bank.put(number, folder)
        entry = Entry(name, folder, AdapterRef(number, facts.digest), facts)
        self._named[name] = self._in_memory[number] = entry
        return entry

    def unload(self, name: str) -> None:
        """Take the name away; the weights go when the last request that uses them has ended."""
        entry = self._find(name)
        del self._named[name]
        self._forget_unnamed(entry)

    def _find(self, name: str) -> Entry:
        entry = self._named.get(name)
        if entry is None:
            known = ", ".join(self._named) or "none"
            raise NoAdapter(f"there is no adapter {name[:200]!r}; loaded: {known}", param="model")
        return entry

    # ------------------------------------------------------------ requests

    def enter(self, leader: Request) -> bool:
        """Whether a request may go on to the scheduler; if not, `collect` passes it on later."""
        entry = self._find(leader.adapter_name)
        can_run = not self._line and self._bring(entry, leader)
        for member in (leader, *leader.children):
            member.adapter = entry.ref
            self._of[member.id] = entry
        if not can_run:
            self._line.append(leader)
        return can_run

    def collect(self, add: Callable[[Request], None]) -> list[TokenEvent]:
        """Pass on those that waited long enough; returns the last events of those that failed."""
        events: list[TokenEvent] = []
        while self._line:
            leader = self._line[0]
            try:
                if not self._bring(self._of[leader.id], leader):
                    break
                self._line.popleft()
                add(leader)
            except QuireError as error:  # its folder is gone, or another one
                self._line.popleft()
                family = (leader, *leader.children)
                events += [TokenEvent(m.id, (), finish="error", error=str(error)) for m in family]
                for member in family:
                    self.leave(member.id)
        return events

    def abort(self, request_id: RequestId, reason: str) -> list[TokenEvent]:
        """End a request that waits here; its siblings stay. No event for ids that are not here."""
        for place, leader in enumerate(self._line):
            family = [leader, *leader.children]
            rest = [member for member in family if member.id != request_id]
            if len(rest) == len(family):
                continue
            leader.children = []
            if rest:
                rest[0].children = rest[1:]
                self._line[place] = rest[0]
            else:
                del self._line[place]
            return [TokenEvent(request_id, (), finish=reason)]
        return []

    def leave(self, request_id: RequestId) -> None:
        """A request has ended; ids that use no adapter are left alone."""
        entry = self._of.pop(request_id, None)
        if entry is not None:
            entry.users.discard(request_id)
            self._forget_unnamed(entry)

    # ------------------------------------------------------------ memory

    def _bring(self, entry: Entry, leader: Request) -> bool:
        """Into memory, for this request. False: all that are there are in use by others."""
        number = entry.ref.number
        if not entry.in_memory:
            if not self._make_room():
                return False
            self._read_again(entry)
        self._in_memory[number] = self._in_memory.pop(number)  # behind all others
        entry.users.update(member.id for member in (leader, *leader.children))
        return True

    def _read_again(self, entry: Entry) -> None:
        number = entry.ref.number
        facts = self.bank.put(number, entry.path)
        if facts.digest != entry.facts.digest:
            self.bank.drop(number)
            raise CheckpointError(
                f"{entry.path} is not what it was when the adapter {entry.name!r} was loaded;"
                " unload it and load it again"
            )
        entry.in_memory, self._in_memory[number] = True, entry

    def _check_room(self) -> None:
        if not self._make_room():
            raise Overloaded(
                f"all {self.max_in_memory} adapters that memory has room for are in use; try again"
                " later, or raise max_loras"
            )

    def _make_room(self) -> bool:
        if len(self._in_memory) < self.max_in_memory:
            return True
        idle = next((entry for entry in self._in_memory.values() if not entry.users), None)
        if idle is not None:
            self._drop(idle)
        return idle is not None

    def _forget_unnamed(self, entry: Entry) -> None:
        is_named = self._named.get(entry.name) is entry
        if entry.in_memory and not is_named and not entry.users:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        del self._in_memory[entry.ref.number]
        entry.in_memory = False
        self.bank.drop(entry.ref.number)

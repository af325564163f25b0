"""A bank of adapters without weights, that counts what is read and how much there is room for."""

from __future__ import annotations

from quire.config import SchedConfig
from quire.errors import CheckpointError, Overloaded
from quire.lora.adapters import Adapters, Facts
from quire.lora.host_room import HostRoom
from quire.sched.policies import waiting_line

SIZE = 100  # bytes of each


class Shelf:
    """`lora.adapters.Bank`. Reads any path but those that end in `broken`; the digest of a path can
    be changed."""

    def __init__(self, room: int = 1 << 30) -> None:
        """`room`: bytes of all that have slots."""
        self.room, self.is_away = room, False
        self.held: dict[int, str] = {}
        self.copies: dict[int, str] = {}
        self.contents: dict[str, bytes] = {}
        self.num_read = 0

    def put(self, number: int, path: str) -> Facts:
        self._check_room()
        if path.endswith("broken"):
            raise CheckpointError(f"no folder {path}")
        self.num_read += 1
        self.held[number] = path
        return Facts(self.contents.get(path, path.encode()), 4, SIZE)

    def drop(self, number: int) -> None:
        del self.held[number]

    def save(self, number: int) -> None:
        assert number not in self.copies, "copied twice"
        self.copies[number] = self.held[number]

    def restore(self, number: int) -> None:
        self._check_room()
        self.held[number] = self.copies[number]

    def forget(self, number: int) -> None:
        del self.copies[number]

    def _check_room(self) -> None:
        if self.is_away or SIZE * (len(self.held) + 1) > self.room:
            raise Overloaded("no room on the GPU")


def shelved(
    shelf: Shelf, num_slots: int, host: HostRoom | None = None, **sched: str | float
) -> Adapters:
    """Without copies unless there is room for them."""
    line = waiting_line(SchedConfig(**sched))  # type: ignore[arg-type]
    return Adapters(shelf, num_slots, line, host or HostRoom(0))

"""Outside: tiers of a simulated engine. Memory, disk and other engines that take bytes over speed.

What is saved, found, worth loading and waited for is decided by the engine's own code: `Transfers`,
`Arrivals`, the shelf in memory and `Tempo`. Here are the times alone: a link takes what is asked of
it one after another. Saving is beside the steps and takes none, as on a device with streams.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.kv.tier_index import Wanted
from quire.request import RequestId
from quire.sched.costs import StepCosts
from quire.sim.clock import Clock
from quire.step import PageLoad, PageSave
from quire.tiers.memory import MemoryShelf
from quire.tiers.tempo import START_S, SURE_BYTES, Tempo

ITEM = 4  # bytes of a token id


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second, one way, and seconds until the first has come."""

    rate: float
    start_s: float = START_S

    def seconds(self, num_bytes: int) -> float:
        return self.start_s + num_bytes / self.rate


@dataclass(frozen=True, slots=True)
class Places:
    """Where an engine keeps pages besides its pool; bytes of 0: it does not."""

    memory: int = 0
    memory_link: Link | None = None  # to the device; None: the pool is in memory of the host too
    disk: int = 0
    disk_link: Link = Link(2e9)
    engines: Link | None = None  # to those that prefill

    @property
    def is_any(self) -> bool:
        return bool(self.memory or self.disk or self.engines)


NO_PLACES = Places()


@dataclass(slots=True)
class OutsideCounts:
    """Nodes of the prefix tree."""

    saves: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    recomputed: int = 0  # fetches that were slower than computing


@dataclass(slots=True)
class _Lane:
    """A link with a queue."""

    link: Link
    free_at: float = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """When these bytes have come."""
        self.free_at = max(self.free_at, now) + self.link.seconds(num_bytes)
        return self.free_at


@dataclass(slots=True)
class _Trip:
    done_at: float
    brings: list[Wanted]  # that were not in memory


class SimTiers:
    """`kv.tier_index.TierIndex`."""

    def __init__(self, places: Places, node_bytes: int, costs: StepCosts, clock: Clock) -> None:
        self._places, self._node_bytes, self._clock = places, node_bytes, clock
        self.counts = OutsideCounts()
        self._shelf = MemoryShelf(places.memory)
        # As long as a node for whoever counts, and one byte in all.
        self._bytes = np.broadcast_to(np.zeros(1, np.uint8), node_bytes).data
        self._disk: OrderedDict[bytes, None] = OrderedDict()  # oldest first
        self._trips: dict[RequestId, _Trip] = {}
        self._computing: set[RequestId] = set()
        self._memory_lane = None if places.memory_link is None else _Lane(places.memory_link)
        self._engine_lane = None if places.engines is None else _Lane(places.engines)
        self._disk_lane = _Lane(places.disk_link)
        self._tempo = Tempo(costs)
        self._tempo.read(SURE_BYTES, SURE_BYTES / places.disk_link.rate)  # as if known for long
        if places.memory_link is not None:
            self._tempo.seconds_per_lifted = 1.0 / places.memory_link.rate

    # ------------------------------------------------------------ as a TierIndex

    def has(self, key: bytes) -> bool:
        return key in self._shelf or key in self._disk

    def fetch(self, owner: RequestId, wanted: Sequence[Wanted], source: str) -> bool:
        missing = [node for node in wanted if not self._shelf.pin(owner, node)]
        now = self._clock.now
        if missing and source and self._engine_lane is not None:
            come = self._engine_lane.take(len(missing) * self._node_bytes, now)
            self._trips[owner] = _Trip(come, missing)
            return True
        if self._memory_lane is None and not missing:
            return False  # the step that admits it copies them
        if not self._is_worth(wanted, len(missing)):
            self.counts.recomputed += 1
            if self._memory_lane is not None:  # what memory has comes with the step otherwise
                self._computing.add(owner)
            return False
        if missing:
            now = self._disk_lane.take(len(missing) * self._node_bytes, now)
        if self._memory_lane is not None:
            now = self._memory_lane.take(len(wanted) * self._node_bytes, now)
        self._trips[owner] = _Trip(now, missing)
        for node in missing:
            self._disk.move_to_end(node.key)
        return True

    def _is_worth(self, wanted: Sequence[Wanted], num_missing: int) -> bool:
        """As the engine decides, with a device and without."""
        read = num_missing * self._node_bytes
        if self._memory_lane is None:
            return self._tempo.is_worth(_tokens(wanted[-num_missing:]), read)
        return self._tempo.is_worth(_tokens(wanted), read, len(wanted) * self._node_bytes)

    def is_bringing(self, owner: RequestId) -> bool:
        trip = self._trips.get(owner)
        if trip is None:
            return False
        if self._clock.now < trip.done_at:
            return True
        for node in trip.brings:
            self._shelf.put(node, self._bytes, owner, "brought")
        del self._trips[owner]
        return False

    def pin(self, owner: RequestId, wanted: Wanted) -> bool:
        return owner not in self._computing and self._shelf.pin(owner, wanted)

    def let_go(self, owner: RequestId) -> None:
        self._trips.pop(owner, None)
        self._computing.discard(owner)
        self._shelf.let_go(owner)

    # ------------------------------------------------------------ as the pool sees them

    def save(self, saves: Sequence[PageSave]) -> None:
        for one in saves:
            self.counts.saves += 1
            if self._places.memory:
                self._shelf.put(Wanted(one.key, one.tokens), self._bytes, None, "memory")
            if self._places.disk:
                self._disk[one.key] = None
                while len(self._disk) * self._node_bytes > self._places.disk:
                    self._disk.popitem(last=False)

    def load(self, loads: Sequence[PageLoad]) -> None:
        keys = {one.key for one in loads}
        self.counts.loads += len(keys)
        self.counts.loaded_bytes += len(keys) * self._node_bytes

    def next_arrival(self) -> float:
        """When the next of those that wait has its pages."""
        return min((trip.done_at for trip in self._trips.values()), default=0.0)


def _tokens(nodes: Sequence[Wanted]) -> int:
    return sum(len(node.tokens) // ITEM for node in nodes)

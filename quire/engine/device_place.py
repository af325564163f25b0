"""DevicePlace: all that pages need between a device's pool and the tiers, and how large it is.

Rooms in memory of the host, a strip on the device where pages wait for their step, and scratch to
gather them in. `tier_parts.py` opens it where the pool is not in memory of the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.args_check import has_tiers
from quire.config import Decision, EngineArgs
from quire.kv.tier_index import PageStore
from quire.memory.device_transfer import DeviceTransfer
from quire.memory.lanes import Lanes, cuda_lanes
from quire.memory.pool import PagePool
from quire.memory.rooms import Rooms
from quire.memory.sizing import size_text
from quire.memory.strip import Strip
from quire.runner.device import total_memory
from quire.tiers.beside import Device
from quire.tiers.tiers import MAX_BACKLOG, MAX_STAGED

MOST_BYTES = 2 << 30  # of the device, for all this
SHARE = 64  # ... or one part in so many of its memory
CHUNK_BYTES = 64 << 20  # gathered at a time: 32 pages of an 8B model
UNDER_WAY = 256 << 20  # of the host, for saves that have not landed


@dataclass(frozen=True, slots=True)
class DevicePlace:
    lanes: Lanes
    rooms: Rooms
    strip: Strip
    chunk: int  # nodes that are gathered at a time
    decision: Decision

    @property
    def beside(self) -> Device:
        return Device(self.rooms, self.strip)

    def transfer(self, pool: PagePool, store: PageStore) -> DeviceTransfer:
        return DeviceTransfer(pool, store, self.lanes, self.strip, self.chunk)


def place_bytes(args: EngineArgs, device: torch.device) -> int:
    """Of the device, besides the pool."""
    if device.type == "cpu" or not has_tiers(args):
        return 0
    return min(MOST_BYTES, total_memory(device) // SHARE)


def open_place(pool: PagePool, limit: int, brings: bool) -> DevicePlace:
    """`limit`: of pages in memory of the host. `brings`: others than those come as well."""
    device = pool.data.device
    node_bytes = len(pool.groups) * pool.page_bytes
    num_nodes = max(1, pool.num_pages // len(pool.groups))
    chunk = max(1, min(CHUNK_BYTES // node_bytes, num_nodes))
    most = min(MOST_BYTES, total_memory(device) // SHARE) - 2 * chunk * node_bytes
    num_rows = max(1, min(most // node_bytes, num_nodes))
    under_way = UNDER_WAY + (MAX_STAGED + MAX_BACKLOG if brings else 0)
    num_rooms = limit // node_bytes + max(1, min(under_way // node_bytes, num_nodes))
    lanes = cuda_lanes(device)
    rooms = Rooms(num_rooms, node_bytes, is_locked=True)
    strip = Strip(num_rows, node_bytes, lanes.loading, device)
    locked, waiting = size_text(num_rooms * node_bytes), size_text(num_rows * node_bytes)
    why = f"locked for copies; {waiting} of {device.type} where pages wait for their step"
    return DevicePlace(lanes, rooms, strip, chunk, Decision("kv beside the pool", locked, why))

"""Places outside the pool as the page draws them: what each holds, and what came back from it."""

from __future__ import annotations

from quire.tiers.tiers import Tiers

Place = dict[str, int | str]


def places_of(tiers: Tiers) -> list[Place]:
    """Those that exist, the nearest first; `limit` and `bytes` are 0 for other engines."""
    counts, disk = tiers.counts, tiers.disk
    places = []
    if tiers.memory.limit:
        memory = tiers.memory
        places.append(_place("memory", memory.num_bytes, memory.limit, counts.loads_memory))
    if disk is not None:
        places.append(_place("disk", disk.num_bytes, disk.limit, counts.loads_disk))
    if tiers.remote is not None:
        places.append(_place("engines", 0, 0, counts.loads_remote))
    return places


def _place(name: str, num_bytes: int, limit: int, loads: int) -> Place:
    return {"name": name, "bytes": num_bytes, "limit": limit, "loads": loads}

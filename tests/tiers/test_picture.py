"""What the page is told of the places outside the pool, on an engine that uses them."""

from __future__ import annotations

from pathlib import Path

from quire.engine.snapshot import Snapshots
from tests.tiers.test_engine import always_load, opened, records, requests

__all__ = ["always_load"]  # a fixture


def test_places_are_those_there_are(tmp_path: Path) -> None:
    """Red when a place is left out, invented, or told of another's bytes or loads."""
    for memory in (None, 1 << 20):
        for engine in opened(tmp_path, kv_host_memory=memory):
            records(engine, requests())
            assert engine.tiers is not None and engine.tiers.flush(5.0)
            places = Snapshots(engine.core, engine.tiers).take()["places"]
            tiers, counts = engine.tiers, engine.tiers.counts
            assert tiers.disk is not None and tiers.disk.num_bytes > 0
            disk = {"name": "disk", "bytes": tiers.disk.num_bytes, "limit": tiers.disk.limit}
            assert places[-1] == disk | {"loads": counts.loads_disk}
            if memory:
                held = {"name": "memory", "bytes": tiers.memory.num_bytes, "limit": memory}
                assert places[0] == held | {"loads": counts.loads_memory}
                assert counts.loads_disk > 0  # what the first engine left there
            assert len(places) == (2 if memory else 1)
            assert Snapshots(engine.core).take()["places"] == []

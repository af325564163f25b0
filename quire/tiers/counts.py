"""TierCounts: what tiers did, for metrics and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounts:
    """Totals since start; pages are of one node each, all layer groups together."""

    loads_memory: int = 0
    loads_disk: int = 0
    loads_remote: int = 0
    loaded_bytes: int = 0
    saves: int = 0
    writes: int = 0  # to the disk
    written_bytes: int = 0
    drops: int = 0  # that were not written: the disk was too slow, full or not writable
    bad: int = 0  # records that were not what was written
    recomputed: int = 0  # fetches that were slower than computing
    pulls: int = 0  # tickets of other engines that brought pages
    pull_seconds: float = 0.0  # of these, from the question to pages that a step can load
    failed_pulls: int = 0  # tickets that brought nothing
    lift_seconds: float = 0.0  # of copies from memory to the device
    tickets: int = 0  # given to others

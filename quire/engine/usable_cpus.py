"""How many CPUs this process may keep busy: its affinity, and the quotas of its control groups.

A container of half a machine sees all its CPUs. Threads beyond the quota do not run faster: they
wait for each other while the kernel holds some of them back.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def usable_cpus(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return max(1, int(min(allowed, _quota(groups, own_group))))


def _quota(groups: Path, own_group: Path) -> float:
    """CPUs' worth of time that the group and every group around it leaves."""
    path = PurePosixPath("/")
    for line in _read(own_group).splitlines():
        if line.startswith("0::"):  # the second version of groups
            path = PurePosixPath(line.removeprefix("0::"))
    least = math.inf
    for group in (path, *path.parents):
        most, _, period = _read(groups / group.relative_to("/") / "cpu.max").partition(" ")
        if most.isdigit() and period.strip().isdigit():  # "max 100000": no limit
            least = min(least, int(most) / int(period))
    return least


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # no such groups here

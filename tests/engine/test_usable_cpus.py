"""Threads by default: no more than the CPUs that may be kept busy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.engine.usable_cpus import usable_cpus


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        ({}, 8),
        ({"": "max 100000\n"}, 8),
        ({"": "300000 100000\n"}, 3),
        ({"a": "250000 100000\n"}, 2),  # half a CPU is none that a thread could have
        ({"a": "50000 100000\n"}, 1),
        ({"a/b": "max 100000\n", "a": "400000 100000\n", "": "600000 100000\n"}, 4),
        ({"a/b": "1600000 100000\n"}, 8),
        ({"other": "100000 100000\n"}, 8),
    ],
)
def test_quotas(limits: dict[str, str], want: int, tmp_path: Path) -> None:
    """Red when a container's quota, or one around it, is not seen, or another group's is."""
    for group, text in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(text)
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    assert usable_cpus(tmp_path, own) == want


def test_without_groups(tmp_path: Path) -> None:
    """Red when another system's lack of these files is an error."""
    assert usable_cpus(tmp_path / "none", tmp_path / "neither") == 8

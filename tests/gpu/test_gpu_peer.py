"""Two ranks on one GPU that map each other's memory: every verb, in graphs, and ranks that fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.dist.peer import PeerComm
from quire.errors import RankLost
from tests.gpu.peer_case import DEVICE, SIZE, Graphed, check_graphs, check_verbs

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


@contextmanager
def second(folder: Path, work: str, deadline_s: float) -> Iterator[PeerComm]:
    """The first rank's way to a second one that does this."""
    meeting = folder / "meeting"
    command = [sys.executable, "-m", "tests.gpu.peer_case", str(meeting), work]
    other = subprocess.Popen(command, cwd=ROOT)
    try:
        yield PeerComm(meeting, (0, SIZE), deadline_s, DEVICE, lambda: other.poll() is None)
        if work in ("verbs", "graphs"):
            assert other.wait(PATIENCE_S) == 0
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(("work", "check"), [("verbs", check_verbs), ("graphs", check_graphs)])
def test_two_ranks_on_one_gpu(work: str, check: Callable[[PeerComm], None], tmp_path: Path) -> None:
    """Red when a verb loses a bit, or when replays of a graph and other launches lose step."""
    with torch.inference_mode(), second(tmp_path, work, PATIENCE_S) as comm:
        check(comm)


@pytest.mark.parametrize(
    ("work", "why"), [("dies", "which is dead"), ("hangs", "heard nothing of the others")]
)
def test_nobody_waits_for_ever(work: str, why: str, tmp_path: Path) -> None:
    """Red when a replay waits for a rank that does not come, or is launched once it is lost."""
    with torch.inference_mode(), second(tmp_path, work, 20.0) as comm:
        graphed, number = Graphed(comm), 0
        begun = time.monotonic()
        with pytest.raises(RankLost, match=why):
            while time.monotonic() - begun < PATIENCE_S:
                graphed.replay(number)
                number += 1
        assert number == 3
        with pytest.raises(RankLost, match=why):
            graphed.replay(number)
        assert torch.ones(3, device=DEVICE).sum().item() == 3, "the device goes on"
        with pytest.raises(RankLost, match=why):
            comm.gather(graphed.given, [6] * SIZE)


def test_nobody_comes(tmp_path: Path) -> None:
    """Red when a rank that is alone waits for the others without an end."""
    begun = time.monotonic()
    with pytest.raises(RankLost, match="did not meet"):
        PeerComm(tmp_path / "meeting", (0, SIZE), 1.0, DEVICE, meet_s=1.0)
    assert time.monotonic() - begun < 20.0

"""Expert loads over the socket: from the counters to the beat that carries them."""

from __future__ import annotations

from pathlib import Path

import torch

from quire.engine import commands as msg
from quire.runner.expert_loads import LoadReader
from tests.server.test_process import Running


def test_a_beat_brings_new_counts_once(tmp_path: Path) -> None:
    """Red when counts are not read between steps, or are sent again unchanged."""
    counters = torch.tensor([[4, 0, 2], [1, 1, 4]])
    running = Running(tmp_path)
    running.process._loads = LoadReader(counters, [1, 5])
    peer = running.connect()
    beats: list[msg.Beat] = []
    while len(beats) < 2 or not beats[-2].expert_tokens:
        report = peer.next()
        if isinstance(report, msg.Beat):
            beats.append(report)
        assert len(beats) < 8
    assert beats[-2].expert_tokens == {1: [4, 0, 2], 5: [1, 1, 4]}
    assert beats[-1].expert_tokens == {}

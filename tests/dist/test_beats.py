"""A rank that loads is waited for as long as it beats: no longer, and no shorter."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from quire.dist.launch import RankProcess
from quire.engine import rank_messages as msg
from quire.engine.rank_beat import beating
from quire.engine.rank_group import RankGroup
from quire.engine.rank_nodes import RemoteRank
from quire.engine.rank_worker import Speaker
from quire.engine.wire import receive
from quire.errors import RankLost
from quire.models.tiny import tiny_model
from tests.dist.group import model_on


def test_a_rank_that_hangs_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a start waits for ever for a rank that was stopped."""
    group = RankGroup(2, silence_s=0.5)
    (other,) = group._others
    assert isinstance(other, RankProcess)
    set_pages = group.set_pages

    def stop_first(count: int) -> int:
        os.kill(other.process.pid, signal.SIGSTOP)
        return set_pages(count)

    monkeypatch.setattr(group, "set_pages", stop_first)
    folder = tiny_model("llama", tmp_path)
    with (
        pytest.raises(RankLost, match="rank 1 fell silent for 0.5 s while it loaded"),
        model_on(group, folder),
    ):
        pass
    assert other.process.poll() is not None
    with pytest.raises(RankLost), model_on(group, folder):
        pass


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def test_a_rank_that_takes_long(ends: tuple[socket.socket, socket.socket]) -> None:
    """Red when a large model is taken for a rank that hangs."""
    near, far = ends
    with closing(RankGroup(1, silence_s=0.3)) as group:
        group._others = (RemoteRank(1, near, "elsewhere"),)
        say = Speaker(far)

        def load() -> None:
            with beating(far, say, every_s=0.05):
                time.sleep(0.9)
            say(msg.Ready())

        loading = threading.Thread(target=load)
        loading.start()
        assert group.await_all(msg.Ready, None) == [msg.Ready()]
        loading.join()


def test_beats_that_nobody_hears(ends: tuple[socket.socket, socket.socket]) -> None:
    """Red when last words wait behind beats, or a beat comes after what it led to."""
    near, far = ends
    say, num_said = Speaker(far), 0

    def count(report: msg.Report) -> None:
        nonlocal num_said
        num_said += 1
        say(report)

    with beating(far, count, every_s=0.0):
        while num_said < 50:
            time.sleep(0.01)
        before = -1
        while before != num_said:  # until there is no room
            before = num_said
            time.sleep(0.2)
    with_room = threading.Thread(target=say, args=(msg.Failed("oh"),), daemon=True)
    with_room.start()
    with_room.join(10.0)
    assert not with_room.is_alive()
    reports = msg.reports()
    heard = [reports.decode(receive(near) or b"") for _ in range(num_said + 1)]
    assert heard == [msg.Beat()] * num_said + [msg.Failed("oh")]

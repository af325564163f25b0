"""A process with thousands of open files still hears its ranks.

Turns red when their sockets are asked with `select`, which knows descriptors up to 1,023.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from quire.engine.rank_group import _has_news
from quire.engine.rank_nodes import RemoteRank
from quire.engine.wire import is_readable

HIGH = 1_500


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection, ours with a number beyond what `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= HIGH:
        if hard <= HIGH:
            pytest.skip(f"at most {hard} files may be open here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (HIGH + 1, hard))
    here, there = socket.socketpair()
    os.dup2(here.fileno(), HIGH)
    here.close()
    ours = socket.socket(fileno=HIGH)
    yield ours, there
    for end in (ours, there):
        with suppress(OSError):
            end.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_are_heard_beyond_a_thousand_files(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, there = ends
    rank = RemoteRank(1, ours, "there")
    assert not _has_news(rank, 0.0) and rank.fate() is None
    begun = time.monotonic()
    assert not is_readable(ours, 0.05)
    assert 0.04 < time.monotonic() - begun < 5.0
    there.sendall(b"news")
    assert _has_news(rank, 5.0) and rank.fate() is None
    ours.recv(4)
    there.close()
    assert _has_news(rank, 5.0)
    assert rank.fate() == "at there closed its connection"
    ours.close()
    assert rank.fate() is not None

"""A served model held by several processes, one of which dies or hangs: clients hear of it, and the
supervisor brings the engine back with all its ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from quire.engine.rank_group import DEADLINE_S
from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import StreamClient
from tests.tiny_folder import write_tiny_folder

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
FLAGS = ("--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "4")
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="starts engines; set QUIRE_LONG_TESTS=1")
LONG = {"prompt": "once upon a time", "max_tokens": 2_000, "ignore_eos": True}


def other_ranks(served: Served) -> list[psutil.Process]:
    return [
        child
        for child in served.engine.children()
        if "quire.engine.rank_worker" in " ".join(child.cmdline())
    ]


async def lost_under_load(served: Served, rank: psutil.Process, how: signal.Signals) -> None:
    client = StreamClient(served.port, "/v1/completions", LONG)
    await client.open()
    await client.read(2)
    os.kill(rank.pid, how)
    stream = await asyncio.wait_for(client.read(), 20 + (how == signal.SIGSTOP) * DEADLINE_S)
    assert [error["code"] for error in stream.errors] == ["engine_unavailable"]


@LONG_ONLY
def test_killed_ranks_come_back(tmp_path: Path) -> None:
    """FT-22. Red when a server hangs on a dead rank, or a rank outlives its server."""
    folder = write_tiny_folder(tmp_path, max_position_embeddings=4_096)
    seen: list[psutil.Process] = []
    with Served(folder, *FLAGS, "-tp", "2") as served:
        (rank,) = other_ranks(served)
        seen += [served.engine, rank]

        asyncio.run(lost_under_load(served, rank, signal.SIGKILL))
        wait_until(served.is_ready, 60, "ready again")
        assert served.complete()[0] == 200
        (rank,) = other_ranks(served)  # while nobody asks for anything
        seen += [served.engine, rank]
        os.kill(rank.pid, signal.SIGKILL)
        wait_until(lambda: not seen[-2].is_running(), 20, "the engine gone with its rank")
        wait_until(served.is_ready, 60, "ready again")
        assert served.complete()[0] == 200
        seen += [served.engine, *other_ranks(served)]
    wait_until(lambda: not any(p.is_running() for p in seen), 10, "nobody left behind")


@LONG_ONLY
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
@pytest.mark.parametrize(
    "ranks",
    [("-tp", "2"), ("-pp", "2"), ("-dp", "2"), ("-tp", "2", "-pp", "2")],
    ids=" ".join,
)
def test_a_lost_rank_of_any_kind(
    ranks: tuple[str, ...], how: signal.Signals, tmp_path: Path
) -> None:
    """Red when a server of stages, or of ranks with requests of their own, hangs on a rank that is
    dead, or for more than a minute on one that does not answer."""
    folder = write_tiny_folder(tmp_path, max_position_embeddings=4_096, num_hidden_layers=2)
    with Served(folder, *FLAGS, *ranks) as served:
        seen = [served.engine, *other_ranks(served)]
        asyncio.run(lost_under_load(served, seen[-1], how))
        wait_until(served.is_ready, 60, "ready again")
        assert served.complete()[0] == 200
        again = [served.engine, *other_ranks(served)]
        assert len(again) == len(seen) and not set(again) & set(seen)
    wait_until(lambda: not any(p.is_running() for p in [*seen, *again]), 10, "nobody left behind")

"""A served model held by two processes, one of which is killed: clients hear of it, and the
supervisor brings the engine back with all its ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import StreamClient
from tests.tiny_folder import write_tiny_folder

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
FLAGS = ("--device", "cpu", "--load-format", "dummy", "--max-num-seqs", "4", "-tp", "2")
LONG = {"prompt": "once upon a time", "max_tokens": 2_000, "ignore_eos": True}


def other_ranks(served: Served) -> list[psutil.Process]:
    return [
        child
        for child in served.engine.children()
        if "quire.engine.rank_worker" in " ".join(child.cmdline())
    ]


@pytest.mark.skipif(not IS_LONG, reason="starts three engines; set QUIRE_LONG_TESTS=1")
def test_killed_ranks_come_back(tmp_path: Path) -> None:
    """FT-22. Red when a server hangs on a dead rank, or a rank outlives its server."""
    folder = write_tiny_folder(tmp_path, max_position_embeddings=4_096)
    seen: list[psutil.Process] = []
    with Served(folder, *FLAGS) as served:
        (rank,) = other_ranks(served)
        seen += [served.engine, rank]

        async def killed_under_load() -> None:
            client = StreamClient(served.port, "/v1/completions", LONG)
            await client.open()
            await client.read(2)
            os.kill(rank.pid, signal.SIGKILL)
            stream = await asyncio.wait_for(client.read(), 20)
            assert [error["code"] for error in stream.errors] == ["engine_unavailable"]

        asyncio.run(killed_under_load())
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

"""Ranks on other machines: who comes in, who does not, and the bits of one rank all the same."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from quire import LLM, SamplingParams
from quire.config import Parallel
from quire.engine import rank_nodes
from quire.engine.rank_group import RankGroup
from quire.engine.rank_nodes import RemoteRank, await_nodes, come
from quire.errors import NotSupported, RankLost
from quire.models.tiny import tiny_model
from tests.dist.group import SMALL, alone, answers, model_on

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")


@pytest.fixture
def asked(tmp_path: Path) -> Parallel:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Parallel(
        tensor_parallel_size=2,
        nnodes=2,
        master_port=port,
        rank_secret=str(tmp_path / "secret"),
        distributed_timeout_seconds=30,
    )


@contextmanager
def waiting(asked: Parallel) -> Iterator[Future[tuple[RemoteRank, ...]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(await_nodes, asked)


def test_whoever_does_not_come_is_named(asked: Parallel) -> None:
    """Red when an engine waits for ever for another machine, or does not say for which."""
    begun = time.monotonic()
    few = replace(asked, tensor_parallel_size=6, nnodes=3, distributed_timeout_seconds=1)
    with pytest.raises(RankLost, match=r"ranks 2, 3, 4, 5 of machines 1, 2 .* within 1 s; .* join"):
        await_nodes(few)
    with pytest.raises(RankLost, match=r"nobody listens at 127\.0\.0\.1"):
        come(replace(asked, node_rank=1, distributed_timeout_seconds=1), 1)
    with pytest.raises(NotSupported, match="an address of this machine"):
        await_nodes(replace(asked, master_addr="192.0.2.1"))
    assert time.monotonic() - begun < 10.0


def test_strangers_are_refused_and_friends_let_in(
    asked: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a machine of another version, number or secret becomes a rank, when one rank comes
    twice, or when a stranger keeps others from coming in."""
    friend = replace(asked, node_rank=1)
    with waiting(asked) as came:
        for stranger, why in (
            (replace(friend, nnodes=4), "want one of 1 to 1 of nnodes=2"),
            (replace(friend, node_rank=2), "got node_rank=2"),
            (replace(friend, rank_secret=str(tmp_path / "other")), "does not let us in"),
        ):
            with pytest.raises(RankLost, match=why):
                come(stranger, None)
        with monkeypatch.context() as patch:
            patch.setattr(rank_nodes, "__version__", "0.0.0")
            silent = socket.create_connection((asked.master_addr, asked.master_port))
            silent.sendall(b"GET / HTTP/1.0\r\n\r\n")
            silent.close()
        with pytest.raises(RankLost, match="rank 0 is here already, or another machine's"):
            come(friend, 0)
        link, ranks = come(friend, None)
        link.close()
        assert ranks == (1,)
        link, _ = come(friend, 1)
        (remote,) = came.result()
        assert remote.rank == 1 and remote.fate() is None
        link.close()
        assert "closed its connection" in str(remote.fate(5.0))
        remote.reap()


@contextmanager
def joined(asked: Parallel, *more: str, prefix: tuple[str, ...] = ()) -> Iterator[int]:
    command = [*prefix, sys.executable, "-m", "quire", "join", "--once", *more]
    for flag, value in (
        ("--master-addr", asked.master_addr),
        ("--master-port", asked.master_port),
        ("--rank-secret", asked.rank_secret),
    ):
        command += [flag, str(value)]
    process = subprocess.Popen(command)
    try:
        yield process.pid
        assert process.wait(20) is not None
    finally:
        process.kill()
        process.wait()


def engine_of(folder: Path, asked: Parallel, **sizes: int) -> LLM:
    where = {
        "nnodes": 2,
        "master_port": asked.master_port,
        "rank_secret": asked.rank_secret,
        "distributed_timeout_seconds": 30,
    }
    return LLM(str(folder), device="cpu", **where | sizes | SMALL)


def test_a_machine_that_joins_gives_the_bits_of_one(asked: Parallel, tmp_path: Path) -> None:
    """Red when ranks of another machine meet nobody, compute something else, or when the first one
    waits for ever for one that is gone."""
    folder = tiny_model("qwen3", tmp_path / "model")
    expected = answers(alone(folder))
    with joined(asked) as pid:
        llm = engine_of(folder, asked, tensor_parallel_size=2)
        assert answers(llm) == expected
        stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
        next(stream)
        (rank,) = psutil.Process(pid).children()
        rank.kill()
        with pytest.raises(RankLost, match=r"rank 1 at 127\.0\.0\.1 closed its connection"):
            list(stream)


@LONG_ONLY
def test_homes_on_two_machines(asked: Parallel, tmp_path: Path) -> None:
    """Red when a rank of another machine takes itself for one that shares heads."""
    folder = tiny_model("deepseek_v3", tmp_path / "model")
    with joined(asked):
        llm = engine_of(folder, asked, data_parallel_size=2)
        assert answers(llm) == answers(alone(folder))
        del llm


@LONG_ONLY
def test_stages_on_two_machines(asked: Parallel, tmp_path: Path) -> None:
    """Red as above."""
    folder = tiny_model("qwen3", tmp_path / "model")
    with joined(asked, "--model", str(folder)):
        llm = engine_of(folder, asked, tensor_parallel_size=2, pipeline_parallel_size=2)
        assert answers(llm) == answers(alone(folder))
        del llm


@LONG_ONLY
def test_another_model_is_noticed(asked: Parallel, tmp_path: Path) -> None:
    """Red when machines compute parts of different models together."""
    folder, other = tiny_model("qwen3", tmp_path / "a"), tiny_model("llama", tmp_path / "b")
    with (
        joined(asked, "--model", str(other)),
        pytest.raises(RankLost, match="is another model than the first one has"),
    ):
        engine_of(folder, asked, pipeline_parallel_size=2)


@contextmanager
def second_host(name: str) -> Iterator[tuple[str, ...]]:
    """A network namespace behind a cable to 10.77.9.1; gives how to run something there."""
    steps = f"""
        netns add {name}
        link add {name} type veth peer name eth0 netns {name}
        addr add 10.77.9.1/24 dev {name}
        link set {name} up
        -n {name} addr add 10.77.9.2/24 dev eth0
        -n {name} link set eth0 up
        -n {name} link set lo up"""
    try:
        for step in steps.strip().splitlines():
            subprocess.run(["ip", *step.split()], check=True, capture_output=True)
        yield ("ip", "netns", "exec", name)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@LONG_ONLY
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="wants root and ip")
def test_a_cable_is_pulled(asked: Parallel, tmp_path: Path) -> None:
    """Red when ranks reach each other over the loopback interface only, or when a machine that
    falls silent is waited for beyond the deadline."""
    folder = tiny_model("qwen3", tmp_path / "model")
    expected = answers(alone(folder))
    asked = replace(asked, master_addr="10.77.9.1")
    with second_host("quire-test") as there, joined(asked, prefix=there) as pid:
        group = RankGroup(2, deadline_s=3.0, nodes=asked)
        with model_on(group, folder, pipeline_parallel_size=2) as llm:
            assert answers(llm) == expected
            stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
            next(stream)
            subprocess.run(["ip", "link", "set", "quire-test", "down"], check=True)
            begun = time.monotonic()
            with pytest.raises(RankLost, match="lost touch with another stage"):
                list(stream)
            assert time.monotonic() - begun < 20.0
        group.close()
        for process in psutil.Process(pid).children(recursive=True):
            process.kill()

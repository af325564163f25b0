"""NCCL between ranks: every verb in a world of one, in graphs, deadlines, and two GPUs if any."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.dist.nccl import NcclComm
from quire.engine import rank_places
from quire.engine.rank_group import RankGroup
from quire.errors import RankLost
from quire.models.tiny import tiny_model
from tests.dist.group import alone, answers, model_on

DEVICE = torch.device("cuda", 0)
SECOND = 2_000_000_000  # cycles of a GPU's clock, or a little more
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def comm_of(folder: Path, deadline_s: float, lives: Callable[[], bool] = lambda: True) -> NcclComm:
    return NcclComm(folder / "meeting", (0, 1), deadline_s, DEVICE, lives)


def test_every_verb_in_a_world_of_one(tmp_path: Path) -> None:
    """Red when a verb changes what it carries, by a bit."""
    comm = comm_of(tmp_path, 60.0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(-6, 18, device=DEVICE).view(4, 6).to(dtype)
        x = x * -0.0 if dtype == torch.bfloat16 else x  # zeros of both signs
        told = x.clone()
        comm.tell(told)
        for made in (
            comm.gather(x, [6]),
            comm.gather_rows(x, [4]),
            comm.merge(x.clone()),
            told,
        ):
            assert made.view(torch.uint8).equal(x.view(torch.uint8))
    assert comm.gather_rows(torch.empty(0, 5, device=DEVICE), [0]).shape == (0, 5)
    comm.check()


@pytest.mark.parametrize("is_dead", [False, True], ids=["late", "dead"])
def test_whoever_is_late_or_dead_is_not_waited_for(is_dead: bool, tmp_path: Path) -> None:
    """Red when a collective that cannot end keeps the host for ever."""
    alive = [True]
    comm = comm_of(tmp_path, 60.0 if is_dead else 0.5, lambda: alive[0])
    comm.merge(torch.ones(2, 2, device=DEVICE))
    torch.cuda.synchronize()
    comm.check()
    torch.cuda._sleep(4 * SECOND)  # stands for a rank that does not come
    comm.merge(torch.ones(2, 2, device=DEVICE))
    alive[0] = not is_dead
    begun = time.monotonic()
    with pytest.raises(RankLost, match="dead" if is_dead else "within 0.5 s"):
        while time.monotonic() - begun < 3.0:
            comm.check()
            time.sleep(0.05)
    with pytest.raises(RankLost):
        comm.gather(torch.ones(2, 2, device=DEVICE), [2])
    torch.cuda.synchronize()


class Graphed:
    """Every verb in a graph, by a world of one."""

    def __init__(self, comm: NcclComm) -> None:
        self.comm, self.given = comm, torch.zeros(4, 6, device=DEVICE)
        self._step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.made = self._step()

    def _step(self) -> list[torch.Tensor]:
        comm, told = self.comm, self.given.clone()
        comm.tell(told)
        merged = comm.merge(self.given.clone())
        return [comm.gather(self.given, [6]), comm.gather_rows(self.given, [4]), merged, told]


def test_every_verb_is_captured(tmp_path: Path) -> None:
    """Red when a verb asks the host in a capture, or a replay gives what was there before; when an
    abort cannot end once graphs have, or a graph is launched after it."""
    comm = comm_of(tmp_path, 60.0)
    graphed = Graphed(comm)
    for number in range(20):
        graphed.given.fill_(-0.0 if number == 7 else number)
        comm.launch(graphed.graph.replay)
        for made in graphed.made:
            assert made.view(torch.int32).equal(graphed.given.view(torch.int32))
        comm.merge(torch.ones(2, 2, device=DEVICE))  # among verbs that run as they come
        comm.check()
    graphed.graph.reset()
    comm._watch.lose("was told to")
    with pytest.raises(RankLost, match="was told to"):
        comm.launch(lambda: pytest.fail("launched"))


@pytest.mark.parametrize("is_dead", [False, True], ids=["late", "dead"])
def test_a_replay_that_cannot_end(is_dead: bool, tmp_path: Path) -> None:
    """Red when the watch does not see replays."""
    alive = [True]
    comm = comm_of(tmp_path, 60.0 if is_dead else 0.5, lambda: alive[0])
    graphed = Graphed(comm)
    torch.cuda._sleep(4 * SECOND)  # stands for a rank that does not come
    comm.launch(graphed.graph.replay)
    alive[0] = not is_dead
    begun = time.monotonic()
    with pytest.raises(RankLost, match="dead" if is_dead else "within 0.5 s"):
        while time.monotonic() - begun < 3.0:
            comm.check()
            time.sleep(0.05)
    with pytest.raises(RankLost):
        comm.launch(graphed.graph.replay)
    graphed.graph.reset()
    torch.cuda.synchronize()


def test_nobody_comes(tmp_path: Path) -> None:
    """Red when a rank that is alone waits for the others without an end."""
    begun = time.monotonic()
    with pytest.raises(RankLost, match="did not meet"):
        NcclComm(tmp_path / "meeting", (0, 2), 1.0, DEVICE, meet_s=1.0)
    assert time.monotonic() - begun < 20.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("way", ["NCCL", "memory of GPUs that all have mapped"])
def test_two_gpus_give_the_bits_of_one(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when what one of these ways carries comes back otherwise."""
    if way == "NCCL":
        monkeypatch.setattr(rank_places, "maps_memory", lambda one, other: False)
    elif not rank_places.maps_memory("cuda:0", "cuda:1"):
        pytest.skip("these GPUs cannot map each other's memory")
    folder = tiny_model("qwen3", tmp_path, **WIDE)
    memory = {"kv_cache_memory": 1 << 22, "page_size": 16}
    expected = answers(alone(folder, device="cuda", **memory))
    group = RankGroup(2)
    try:
        with model_on(group, folder, device="cuda", **memory) as llm:
            assert answers(llm) == expected
            made = {decision.what: decision.value for decision in llm.decisions}
            assert made["between ranks"] == way
            assert made["steps"] == "graphs"
    finally:
        group.close()

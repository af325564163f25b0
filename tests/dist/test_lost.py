"""A rank that dies or hangs ends its group: with a reason, within the deadline, leaving nobody."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.dist.launch import RankProcess
from quire.engine.rank_group import RankGroup
from quire.errors import RankLost
from quire.models.tiny import tiny_model
from tests.dist.group import SMALL, model_on

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")
HOMES = {"tensor_parallel_size": 1, "data_parallel_size": 2}


@pytest.mark.parametrize("home", [1, 0], ids=["whose request it is", "who only helps"])
def test_a_lost_rank_is_noticed_where_each_has_requests(home: int, tmp_path: Path) -> None:
    """Red when ranks go on without one that attends rows of its own, or of none."""
    group = RankGroup(2, deadline_s=2.0)
    with model_on(group, tiny_model("qwen2_moe", tmp_path), **HOMES) as llm:
        if home == 1:  # the first rank has this one, so the next goes to the other
            other = llm.stream([8, 9, 10], LONG)
            next(other)
        end_one(llm, group, group._others[0], signal.SIGKILL)


# How many ranks on how many stages, who is lost, and to what.
CASES = [
    pytest.param(2, 1, 1, signal.SIGKILL, id="killed"),
    pytest.param(2, 1, 1, signal.SIGSTOP, id="stopped"),
    pytest.param(3, 3, 1, signal.SIGKILL, id="the middle stage"),
    pytest.param(3, 3, 2, signal.SIGSTOP, id="the last stage stopped", marks=LONG_ONLY),
    pytest.param(3, 3, 2, signal.SIGKILL, id="the last stage", marks=LONG_ONLY),
    pytest.param(4, 2, 1, signal.SIGKILL, id="beside the first", marks=LONG_ONLY),
    pytest.param(4, 2, 2, signal.SIGKILL, id="the next stage", marks=LONG_ONLY),
    pytest.param(4, 2, 3, signal.SIGSTOP, id="beside the next, stopped", marks=LONG_ONLY),
]


@pytest.mark.parametrize(("size", "stages", "rank", "number"), CASES)
def test_a_lost_rank_is_noticed(
    size: int, stages: int, rank: int, number: signal.Signals, tmp_path: Path
) -> None:
    """Red when somebody waits for ever for a rank, or a process is left behind."""
    folder = tiny_model("llama", tmp_path, num_hidden_layers=3)
    group = RankGroup(size, deadline_s=2.0)
    with model_on(group, folder, pipeline_parallel_size=stages) as llm:
        end_one(llm, group, group._others[rank - 1], number)


def end_one(llm: LLM, group: RankGroup, other: RankProcess, number: signal.Signals) -> None:
    assert group.trouble() is None
    stream = llm.stream([5, 6, 7], LONG)
    next(stream)
    os.kill(other.process.pid, number)
    begun = time.monotonic()
    with pytest.raises(RankLost, match="rank"):
        list(stream)
    assert time.monotonic() - begun < 30.0
    assert all(each.process.poll() is not None for each in group._others)
    if number == signal.SIGKILL:
        assert f"rank {other.rank} was killed by signal 9" in str(group.trouble())
    with pytest.raises(RankLost):
        llm.generate([[5, 6, 7]], LONG, use_tqdm=False)
    group.close()


def test_nobody_outlives_the_first_rank(tmp_path: Path) -> None:
    """Red when ranks stay behind as orphans after their engine is gone."""
    import gc

    folder = tiny_model("llama", tmp_path)
    llm = LLM(str(folder), tensor_parallel_size=2, device="cpu", **SMALL)
    assert llm._engine.group is not None
    (other,) = llm._engine.group._others
    del llm
    gc.collect()
    assert other.process.poll() is not None

"""A rank that dies or hangs ends its group: with a reason, within the deadline, leaving nobody."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.rank_group import RankGroup
from quire.errors import RankLost
from quire.models.tiny import tiny_model
from tests.dist.group import SMALL, model_on

LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_is_noticed(number: signal.Signals, tmp_path: Path) -> None:
    """Red when somebody waits for ever for a rank, or a process is left behind."""
    folder = tiny_model("llama", tmp_path)
    group = RankGroup(2, deadline_s=2.0)
    with model_on(group, folder) as llm:
        end_one(llm, group, number)


def end_one(llm: LLM, group: RankGroup, number: signal.Signals) -> None:
    assert group.trouble() is None
    (other,) = group._others
    stream = llm.stream([5, 6, 7], LONG)
    next(stream)
    os.kill(other.process.pid, number)
    begun = time.monotonic()
    with pytest.raises(RankLost, match="rank"):
        list(stream)
    assert time.monotonic() - begun < 30.0
    assert other.process.poll() is not None
    if number == signal.SIGKILL:
        assert "rank 1 was killed by signal 9" in str(group.trouble())
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

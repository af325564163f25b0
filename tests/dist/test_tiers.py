"""Pages in memory and on disk where ranks hold a model together: all ranks of a page, or none.

Oracle: one rank without tiers, token by token and float by float.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.dist.launch import RankProcess
from quire.engine.rank_group import RankGroup
from quire.errors import RankLost
from quire.models.tiny import tiny_model
from quire.tiers.tempo import Tempo
from quire.tiers.tiers import Tiers
from tests.dist.group import SMALL, alone, answers, model_on

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))
LONG_ONLY = pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")
NUM_KILLS = 12 if IS_LONG else 1

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, ignore_eos=True)
WISHES = [GREEDY, GREEDY.with_(temperature=0.9, seed=7)] * 3
BASE = [2 + i * 7 % 90 for i in range(41)]
# Prompts that share much, little and nothing; one of them is a whole number of pages.
PROMPTS = [BASE, BASE[:32], [*BASE, 5, 6, 7], [9, 8, 7], [3] * 33, [*BASE[:20], *range(40, 70)]]

# family, what differs from its tiny member, arguments of the engine, stages
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "uneven heads": ("qwen3", {"num_attention_heads": 9, "num_key_value_heads": 3}, {}, 1),
    "experts": ("qwen2_moe", {}, {}, 1),
    "latents": ("deepseek_v3", {}, {}, 1),
    "latents on stages": ("deepseek_v3", {}, {}, 2),
    "windows on stages": ("gemma3_text", {}, {}, 2),
    "codes": ("qwen3", {"head_dim": 32}, {"kv_cache_dtype": "int8"}, 1),
    "codes on stages": ("qwen3", {"head_dim": 32}, {"kv_cache_dtype": "int8"}, 2),
    "windows": ("gemma3_text", {}, {}, 1),
    "experts on stages": ("qwen2_moe", {}, {}, 2),
    "int4": ("llama", {"hidden_size": 64}, {"quantization": "rtn-int4-g32"}, 1),
}
QUICK = ("uneven heads", "experts", "latents on stages", "windows on stages", "codes")


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than any disk."""
    monkeypatch.setattr(Tempo, "is_worth", lambda *args: True)


def said(llm: LLM) -> list[object]:
    return answers(llm, PROMPTS, WISHES)


def tiers_of(llm: LLM) -> Tiers:
    assert llm._engine.tiers is not None
    return llm._engine.tiers


@contextmanager
def kept(group: RankGroup, folder: Path, disk: Path, **args: Any) -> Iterator[LLM]:
    """An engine with a disk, whose pages are all written at the end."""
    with model_on(group, folder, kv_disk=str(disk), **args) as llm:
        yield llm
        tiers_of(llm).close()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pages"))


@pytest.mark.parametrize("name", CASES if IS_LONG else QUICK)
def test_pages_come_back_on_all_ranks(name: str, group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank loads another's share, another page's, or does not load what others do."""
    family, changes, args, stages = CASES[name]
    folder, disk = tiny_model(family, tmp_path, **changes), tmp_path / "kv"
    args = args | {"pipeline_parallel_size": stages}
    expected = said(alone(folder, **CASES[name][2]))
    with kept(group, folder, disk, kv_host_memory=1 << 20, **args) as llm:
        assert said(llm) == expected
        llm._engine.core.scheduler.kv.flush()
        assert said(llm) == expected
        assert tiers_of(llm).counts.loads_memory > 10
    with kept(group, folder, disk, **args) as llm:
        assert said(llm) == expected
        counts = tiers_of(llm).counts
        assert counts.loads_disk > 10 and not counts.writes, "all was there"


@LONG_ONLY
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_four_ranks_bring_pages_back(stages: int, tmp_path: Path) -> None:
    """Red as above, where ranks outnumber key heads, and where stages are shared out."""
    folder = tiny_model("deepseek_v3" if stages == 2 else "qwen3", tmp_path, num_hidden_layers=5)
    expected = said(alone(folder))
    group = RankGroup(4)
    try:
        for round in range(2):
            with kept(group, folder, tmp_path / "kv", pipeline_parallel_size=stages) as llm:
                assert said(llm) == expected
                assert bool(tiers_of(llm).counts.loads_disk) == bool(round)
    finally:
        group.close()


@pytest.mark.parametrize("stages", [1, 2])
def test_preemption_parks(stages: int, group: RankGroup, tmp_path: Path) -> None:
    """Red when pages that left the pool on all ranks are computed again, or those of a step that
    is still under way are kept."""
    folder = tiny_model("qwen3", tmp_path, num_hidden_layers=2)
    wishes = [wish.with_(max_tokens=40) for wish in WISHES]
    prompts = [[i, *BASE[:19]] for i in range(2, 8)]
    one = alone(folder)
    expected = answers(one, prompts, wishes)
    pages = 27 * one._engine.runner.pool.page_bytes // 2  # for three that grow to 16 each
    args = {"kv_cache_memory": pages, "pipeline_parallel_size": stages}
    with model_on(group, folder, kv_host_memory=1 << 22, **args) as llm:
        assert answers(llm, prompts, wishes) == expected
        assert llm.stats().num_preempted > 0
        assert tiers_of(llm).counts.loads_memory > 0


def test_damage_on_one_rank_is_a_miss_for_all(group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank takes a page that another one could not read, or what was lost on one rank
    is not written again."""
    folder, disk, rng = tiny_model("qwen3", tmp_path), tmp_path / "kv", Random(3)
    expected = said(alone(folder))
    with kept(group, folder, disk) as llm:
        assert said(llm) == expected
    whole = loads(group, folder, disk, expected)
    for damage in ("flipped", "cut", "gone"):
        for path in segments(disk / "rank-1"):
            content = bytearray(path.read_bytes())
            for _ in range(len(content) // 2500 if damage == "flipped" else 0):
                content[rng.randrange(64, len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content[: len(content) // 3] if damage == "cut" else content)
            if damage == "gone":
                path.unlink()
        assert loads(group, folder, disk, expected) < whole, damage
        # A record's bytes are looked at when it is read, so each start finds one more of a chain.
        starts = (loads(group, folder, disk, expected) for _ in range(8))
        assert any(found == whole for found in starts), damage


def loads(group: RankGroup, folder: Path, disk: Path, expected: list[object]) -> int:
    """Pages read from the disk by an engine that starts; its answers are right."""
    with kept(group, folder, disk) as llm:
        assert said(llm) == expected
        return tiers_of(llm).counts.loads_disk


def test_a_full_disk_of_one_rank_costs_pages_alone(group: RankGroup, tmp_path: Path) -> None:
    """Red when a rank that cannot write keeps others from answering, or half a page is found."""
    folder, disk = tiny_model("qwen3", tmp_path), tmp_path / "kv"
    expected = said(alone(folder))
    (other,) = group._others
    assert isinstance(other, RankProcess)
    soft, hard = resource.prlimit(other.process.pid, resource.RLIMIT_FSIZE)
    with kept(group, folder, disk) as llm:
        resource.prlimit(other.process.pid, resource.RLIMIT_FSIZE, (2000, hard))
        assert said(llm) == expected
        llm._engine.core.scheduler.kv.flush()
        assert said(llm) == expected
    resource.prlimit(other.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert sum(path.stat().st_size for path in segments(disk / "rank-1")) <= 2000
    assert loads(group, folder, disk, expected) < 5
    assert loads(group, folder, disk, expected) > 10, "it was written when there was room again"


def test_other_groups_find_nothing(group: RankGroup, tmp_path: Path) -> None:
    """Red when a share is taken for that of another cut, or the folder is spoiled for the first."""
    folder, disk = tiny_model("qwen3", tmp_path), tmp_path / "kv"
    expected = said(alone(folder))
    with kept(group, folder, disk) as llm:
        assert said(llm) == expected
    for args in ({"pipeline_parallel_size": 2}, {"tp_reduce": "fast"}):
        with kept(group, folder, disk, **args) as llm:
            shelf = tiers_of(llm).disk
            assert shelf is not None and len(shelf) == 0 and shelf.num_foreign > 0
            assert "fast" in args.values() or said(llm) == expected
            assert tiers_of(llm).counts.loads_disk == 0
    one = alone(folder, kv_disk=str(disk))
    assert said(one) == expected and tiers_of(one).counts.loads_disk == 0
    tiers_of(one).close()
    assert loads(group, folder, disk, expected) > 10


def test_shares_are_not_taken_for_each_other(group: RankGroup, tmp_path: Path) -> None:
    """Red when one rank's folder can stand in for another's."""
    folder, disk = tiny_model("qwen3", tmp_path), tmp_path / "kv"
    expected = said(alone(folder))
    with kept(group, folder, disk) as llm:
        assert said(llm) == expected
    for path in segments(disk):
        (disk / "rank-1" / path.name).write_bytes(path.read_bytes())
    (disk / "rank-1" / "secret").write_bytes((disk / "secret").read_bytes())
    assert loads(group, folder, disk, expected) == 0


def test_no_disk_for_one_is_none_for_all(group: RankGroup, tmp_path: Path) -> None:
    """Red when ranks start with tiers of different kinds, or nobody says why there is no disk."""
    folder, disk = tiny_model("qwen3", tmp_path), tmp_path / "kv"
    expected = said(alone(folder))
    disk.mkdir()
    (disk / "rank-1").write_text("")
    with model_on(group, folder, kv_disk=str(disk), kv_host_memory=1 << 20) as llm:
        (off,) = [one for one in llm.decisions if one.what == "kv disk"]
        assert off.value == "off" and "rank 1" in off.why and "File exists" in off.why
        assert said(llm) == expected
        llm._engine.core.scheduler.kv.flush()
        assert said(llm) == expected
        assert tiers_of(llm).disk is None and tiers_of(llm).counts.loads_memory > 10
    assert not segments(disk)


def test_killed_ranks_leave_no_bad_page(tmp_path: Path) -> None:
    """Red when an engine that ends leaves pages unwritten or folders locked on another rank, or
    when what a rank was writing as it was killed is taken for a page."""
    folder, disk = tiny_model("qwen3", tmp_path), str(tmp_path / "kv")
    expected = said(alone(folder))
    args: dict[str, Any] = {"kv_disk": disk, "tensor_parallel_size": 2, "device": "cpu"} | SMALL
    llm = LLM(str(folder), **args)
    assert said(llm) == expected
    for kill in range(NUM_KILLS):
        del llm
        gc.collect()
        llm = LLM(str(folder), **args)
        assert said(llm) == expected
        assert tiers_of(llm).counts.loads_disk > 10
        assert llm._engine.group is not None
        (other,) = llm._engine.group._others
        assert isinstance(other, RankProcess)
        stream = llm.stream([kill] * 30, GREEDY.with_(max_tokens=60))
        for _ in range(2 + 7 * kill % 25):
            next(stream)
        os.kill(other.process.pid, signal.SIGKILL)
        with pytest.raises(RankLost):
            list(stream)
    del llm, stream
    gc.collect()
    llm = LLM(str(folder), **args)
    again = [[kill] * 30 for kill in range(NUM_KILLS)]
    params = [GREEDY.with_(max_tokens=60)] * NUM_KILLS
    assert answers(llm, again, params) == answers(alone(folder), again, params)
    assert said(llm) == expected

"""Stages one by one: which layers, bytes and pages are whose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.config import EngineArgs
from quire.dist.ranks import Ranks
from quire.dist.stages import Stage, stage_layers
from quire.engine.rank_group import RankGroup
from quire.errors import NotSupported
from quire.kv.groups import layer_groups
from quire.load.checkpoint import Checkpoint
from quire.load.loader import load_weights
from quire.load.open import open_model
from quire.models.decoder import Decoder, heads_of
from quire.models.registry import names_of, spec_of
from quire.models.tiny import tiny_model
from quire.runner.stage_runner import FirstStageRunner
from quire.step import Pending, StepPlan
from tests.dist.group import PARAMS, PROMPTS, alone, answers, model_on


class Watched:
    """A checkpoint that notes what is read of it."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner, self.was_read = inner, set[str]()

    def read(self, name: str) -> torch.Tensor:
        self.was_read.add(name)
        return self._inner.read(name)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen2_moe"])
def test_each_stage_reads_its_own_bytes(family: str, tmp_path: Path) -> None:
    """Red when a stage reads a tensor that it does not compute with, or two read the same one."""
    folder = tiny_model(family, tmp_path)
    checkpoint = open_model(EngineArgs(model=str(folder))).checkpoint
    spec = spec_of(checkpoint.config)
    reads = []
    for index in range(2):
        watched = Watched(checkpoint)
        ranks = Ranks(stage=Stage(index, 2))
        sizes = heads_of(spec, 4), 32, torch.float32, torch.device("cpu")
        model = Decoder(spec, *sizes, ranks)
        load_weights(model, watched, names_of(checkpoint.config, spec))  # type: ignore[arg-type]
        reads.append(watched.was_read)
    assert not reads[0] & reads[1]
    assert reads[0] | reads[1] == set(checkpoint.names()) - (
        {"lm_head.weight"} if spec.tied else set()
    )


def test_steps_are_under_way_at_once(group: RankGroup, tmp_path: Path) -> None:
    """Red when a stage waits for the others before it begins a step that could have begun, or when
    requests that leave in the middle of one leave something behind."""
    folder = tiny_model("qwen3", tmp_path)
    prompts = PROMPTS * 2
    params = [each.with_(max_tokens=40, ignore_eos=True) for each in PARAMS] * 2
    tight = {"kv_cache_memory": 26 << 10}
    expected = answers(alone(folder), prompts, params)
    with model_on(group, folder, pipeline_parallel_size=2, **tight) as llm:
        seen = watch(llm)
        assert answers(llm, prompts, params) == expected
        assert max(seen) == 2
        assert llm.stats().num_preempted > 0
        stream = llm.stream(PROMPTS[0], PARAMS[0])
        next(stream)
        stream.close()
        assert answers(llm, prompts, params) == expected


def watch(llm: LLM) -> list[int]:
    """How many steps were under way after each launch."""
    runner, seen = llm._engine.runner, list[int]()
    assert isinstance(runner, FirstStageRunner)
    launch = runner.execute

    def execute(plan: StepPlan) -> Pending:
        made = launch(plan)
        seen.append(len(runner._rounds))
        return made

    runner.execute = execute  # type: ignore[method-assign]
    return seen


def test_layers_are_dealt_evenly() -> None:
    """Red when a layer is nobody's, or the stage that has the embedding gets the most."""
    for num_layers in range(1, 30):
        for num_stages in range(1, num_layers + 1):
            stages = stage_layers(num_layers, num_stages)
            assert [i for layers in stages for i in layers] == list(range(num_layers))
            sizes = [len(layers) for layers in stages]
            assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes)
    with pytest.raises(NotSupported, match="pipeline_parallel_size=3"):
        stage_layers(3, 4)


def test_a_stage_keeps_places_of_its_own_layers() -> None:
    """Red when a stage's tables differ from another's, or it keeps pages of layers it has not."""
    windows = [64, None, 64, None, 64, 64, 64, None]
    groups = layer_groups(windows, 8, is_staged=True)
    for layers in stage_layers(8, 3):
        own = groups.of_layers(layers)
        assert own.windows == groups.windows
        assert own.layers == tuple(layers)
        assert own.num_places <= min(groups.num_places, len(layers))
        assert len({(own.group_of(i), own.place_of(i)) for i in layers}) == len(layers)
        assert all(own.group_of(i) == groups.group_of(i) for i in layers)


def test_windows_do_not_keep_a_stage_from_saving_memory() -> None:
    """Red when a stage's share of a page is as large as the whole page."""
    windows = [None if i % 6 == 5 else 512 for i in range(24)]
    groups = layer_groups(windows, 24, is_staged=True)
    assert groups.num_places == layer_groups(windows, 24).num_places == 4
    assert [groups.of_layers(layers).num_places for layers in stage_layers(24, 2)] == [2, 2]

"""Drafts in steps that replay graphs, a step ahead of the host, with a stand-in that runs on a CPU.

`EagerGraphs` gets what a graph gets: rows and positions of tokens, neighbours of one row for
whoever has drafts verified. Red when padding or a refused draft reaches a result, when drafts are
made while the newest token is not known, or when heads read states of other tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.llm import LLM
from quire.runner.drafter import ModelDrafter
from quire.step import Pending, StepPlan
from tests.engine.test_graph_path import EagerGraphs, with_graphs
from tests.spec import heads
from tests.spec.cases import TEXTS, Told, answer, everyone, open_tiny, sampling

CROWDS: dict[str, dict[str, Any]] = {
    "crowded": {},
    "chunked": {"max_num_batched_tokens": 24},
    "preempted": {"num_spare_pages": 8, "max_num_batched_tokens": 24},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[object]]:
    families = ("llama", "gemma3_text", "deepseek_v3")
    return {family: answer(open_tiny(folder, family), everyone()) for family in families}


def graphed(llm: LLM) -> list[EagerGraphs]:
    """Of the target and, where there is one, of the model that drafts; with a step of lag."""
    engine = llm._engine
    engine.core.lag = 1
    made = [with_graphs(engine)]
    if isinstance(engine.runner.drafter, ModelDrafter):
        drafting = engine.runner.drafter.runner
        drafting.graphs = EagerGraphs(drafting)
        made.append(drafting.graphs)
    return made


@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_told_drafts(family: str, crowd: str, folder: Path, plain: dict[str, list[object]]) -> None:
    llm = open_tiny(folder, family, **CROWDS[crowd])
    (graphs,) = graphed(llm)
    told = Told.of(llm, everyone())
    graphs.num_replays = 0
    assert answer(llm, everyone()) == plain[family]
    assert told.num_accepted > 200 and told.num_refused > 100
    assert graphs.num_replays > 10


METHODS = {
    "ngram": ("llama", {"method": "ngram", "prompt_lookup_min": 1}),
    "draft model": ("llama", {"method": "draft_model"}),
    "early exit": ("gemma3_text", {"method": "early_exit"}),
    "eagle3": ("llama", None),
    "medusa": ("llama", None),
    "mtp": ("deepseek_v3", None),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str, folder: Path, plain: dict[str, list[object]]) -> None:
    family, asked = METHODS[name]
    if asked is None:
        if name == "mtp":
            heads.add_mtp(folder / family)
        asked = heads.head_for(name, folder, family)
    else:
        asked = {**asked, "adaptive": False, "num_speculative_tokens": 3}
    if name == "draft model":
        asked["model"] = str(folder / "llama")
    llm = open_tiny(folder, family, speculative_config=asked)
    made = graphed(llm)
    assert answer(llm, everyone()) == plain[family]
    stats = llm.stats()
    assert stats.num_accepted_tokens > (30 if name in ("ngram", "draft model") else 0)
    assert all(graphs.num_replays > 5 for graphs in made)


@pytest.mark.parametrize(("allowed", "ahead"), [(0, 1), (None, 0)])
def test_results_are_awaited_for_the_sake_of_drafts(
    allowed: int | None, ahead: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the engine waits for results that nobody drafts on, or drafts without them."""
    llm = open_tiny(folder, "llama", speculative_config={"method": "suffix", "adaptive": False})
    core = llm._engine.core
    core.lag, execute, seen = 1, core.runner.execute, set()

    def watched(plan: StepPlan) -> Pending:
        seen.add(len(core._inflight))
        return execute(plan)

    monkeypatch.setattr(core.runner, "execute", watched)
    params = sampling("greedy", 1, num_speculative_tokens=allowed, ignore_eos=True)
    llm.generate([TEXTS[0]], params, use_tqdm=False)
    assert max(seen) == ahead

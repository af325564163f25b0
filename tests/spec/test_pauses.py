"""Heads that stop reading and take up again, at random, in every step: nothing changes.

Turns red when a pause leaves a trace in tokens or logprobs, when a head reads a state of another
position or of a token that was not drawn, when what was kept before a pause is lost, or when a step
that nobody drafts from keeps its states.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.llm import LLM
from quire.request import RequestId
from quire.sched.costs import StepCosts
from quire.sched.scheduler import Scheduler
from quire.spec.depth import Costs
from quire.spec.speculation import Speculation
from quire.step import Draft, StepPlan, TokenEvent, Took
from tests.engine.test_graph_path import with_graphs
from tests.spec import heads
from tests.spec.cases import TEXTS, answer, everyone, open_tiny, sampling
from tests.spec.head_oracles import streams_of, target_of


@dataclass
class Pausing:
    """Leaves the drafts to the head, of random depth; reads and pauses by chance."""

    rng: random.Random = field(default_factory=lambda: random.Random(7))
    share: float = 0.6  # of works that are read
    parents: tuple[int, ...] = ()
    num_drafted: int = 0
    num_read: int = 0
    num_skipped: int = 0
    num_resumed: int = 0  # drafts where states were there again
    _read: dict[RequestId, list[bool]] = field(default_factory=dict)

    def awaits_results(self, scheduler: Scheduler) -> bool:
        return self.rng.random() < 0.8

    def make(self, scheduler: Scheduler) -> dict[RequestId, Draft]:
        return {
            request.id: Draft(depth, (), self.parents[:depth])
            for request in scheduler.running.values()
            if request.num_to_feed == 1 and not request.num_pending
            if (depth := self.rng.randint(0, len(self.parents) or 3))
        }

    def marked(self, plan: StepPlan) -> StepPlan:
        works = []
        for work in plan.works:
            past = self._read.setdefault(work.request_id, [])
            self.num_resumed += bool(work.num_drafts) and past[-1:] == [True] and not all(past)
            past.append(self.rng.random() < self.share)
            self.num_read += past[-1]
            self.num_skipped += not past[-1]
            works.append(work._replace(is_read=past[-1]))
        return replace(plan, works=tuple(works))

    def learn(self, plan: StepPlan, events: Sequence[TokenEvent], took: Took) -> None:
        self.num_drafted += sum(event.num_drafted for event in events)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    open_tiny(made, "llama")
    open_tiny(made, "deepseek_v3")
    heads.add_mtp(made / "deepseek_v3")
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[object]]:
    return {name: answer(open_tiny(folder, name), everyone()) for name in ("llama", "deepseek_v3")}


SMALL = {"num_spare_pages": 8, "max_num_batched_tokens": 24}
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "eagle3": ("llama", SMALL, ()),
    "eagle3, graphs": ("llama", {}, ()),
    "eagle3 tree": ("llama", {}, (0, 0, 1, 2)),
    "medusa": ("llama", SMALL, ()),
    "medusa tree": ("llama", {"max_num_batched_tokens": 24}, (0, 0, 1)),
    "mtp": ("deepseek_v3", {"max_num_batched_tokens": 24}, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_pauses_change_nothing(name: str, folder: Path, plain: dict[str, list[object]]) -> None:
    family, crowd, parents = CASES[name]
    method = name.replace(",", " ").split()[0]
    config = heads.head_for(method, folder, family)
    if parents:
        del config["num_speculative_tokens"]
        config["speculative_token_tree"] = "[(0,), (1,), (0, 0), (1, 0)]"
    llm = open_tiny(folder, family, speculative_config=config, **crowd)
    if "graphs" in name:
        llm._engine.core.lag = 1
        with_graphs(llm._engine)
    drafts = llm._engine.core.drafts = Pausing(parents=parents)
    assert answer(llm, everyone()) == plain[family]
    assert answer(llm, everyone()) == plain[family]  # with prefix hits
    assert drafts.num_drafted > 300 and drafts.num_skipped > 100 and drafts.num_resumed > 100


# ------------------------------------------------------------ what a head reads


def taken_by(llm: LLM) -> list[tuple[int, int, int, Tensor]]:
    """(request, first position, positions, states) of all that the head takes to read."""
    found: list[tuple[int, int, int, Tensor]] = []
    drafter: Any = llm._engine.runner.drafter
    kept, core = drafter._kept, llm._engine.core
    take = kept.take

    def watched(row: int, stop: int) -> tuple[int, Tensor]:
        start, states = take(row, stop)
        owner = next(r.id for r in core.scheduler.running.values() if r.row == row)
        found.append((owner, start, len(states), states.clone()))
        return start, states

    kept.take = watched
    return found


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@torch.inference_mode()
def test_a_head_reads_what_is_right(share: float, folder: Path) -> None:
    """Every state belongs to its token, no position is read twice, and none that was kept, and
    turned out right, is forgotten."""
    config = heads.head_for("eagle3", folder, "llama")
    llm = open_tiny(
        folder, "llama", speculative_config=config, enable_prefix_caching=False, max_num_seqs=4
    )
    drafts = llm._engine.core.drafts = Pausing(share=share)
    taken, marked, marks = taken_by(llm), drafts.marked, list[tuple[int, int]]()

    def watched(plan: StepPlan) -> StepPlan:
        made = marked(plan)
        marks.extend((work.request_id, work.start) for work in made.works if work.is_read)
        return made

    drafts.marked = watched  # type: ignore[method-assign]
    params = sampling("warm", 3, max_tokens=90, ignore_eos=True)
    outputs = llm.generate([TEXTS[0], TEXTS[1]], params, use_tqdm=False)
    target, seen = target_of(folder / "llama"), 0
    ids = sorted({owner for owner, *_ in marks})
    for id, output in zip(ids, outputs, strict=True):
        tokens = [*(output.prompt_token_ids or []), *output.outputs[0].token_ids]
        want = torch.cat(streams_of(target, tokens)[:3], 1)
        read: list[int] = []
        for owner, start, num, states in taken:
            if owner == id:
                torch.testing.assert_close(states, want[start : start + num], rtol=1e-3, atol=1e-3)
                read += range(start, start + num)
        assert len(read) == len(set(read))
        kept = {start for owner, start in marks if owner == id}  # the first is right in any case
        assert {at for at in kept if at < max(read)} <= set(read)
        seen += len(read)
    assert seen > 40


def test_nothing_is_kept_where_drafts_cannot_pay(folder: Path) -> None:
    """Red when a step hands over states that nobody drafts from."""
    config = {**heads.head_for("eagle3", folder, "llama"), "adaptive": True}
    llm = open_tiny(folder, "llama", speculative_config=config, max_num_batched_tokens=1024)
    drafts, runner = llm._engine.core.drafts, llm._engine.runner
    assert isinstance(drafts, Speculation)
    steps: list[bool] = []
    reads = runner._reads
    runner._reads = lambda works: (steps.append(reads(works) is not None), reads(works))[1]  # type: ignore[method-assign]
    steep = StepCosts.of([(1, 1.0), (4, 1.1), (64, 40.0)])
    drafts.costs, drafts.learned = Costs(steep, StepCosts.of([(1, 0.01)])), None
    drafts.restart()
    many = [(text, sampling("greedy", 1, ignore_eos=True)) for text in TEXTS * 3]
    answer(llm, many)
    assert len(steps) > 20 and not any(steps), "the head reads along with twelve requests"
    steps.clear()
    answer(llm, many[:1])
    assert steps[0] and drafts.counts.num_runs > 0, "it does not read a lone prompt"

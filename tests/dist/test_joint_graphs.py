"""Graphs that ranks replay together: the first says which, all capture one or none has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quire.dist.ranks import Ranks
from quire.engine import rank_group
from quire.engine.rank_group import RankGroup
from quire.engine.rank_messages import Order, Step, orders
from quire.engine.seat import FirstSeat
from quire.models.tiny import tiny_model
from quire.runner.graphs import Decoded
from quire.runner.joint_graphs import JointMemory
from quire.step import StepForm, StepPlan
from tests.dist.graphed import FAILS, EagerMemory, Launched, graphed
from tests.dist.group import alone, answers, model_on

CAPTURES = StepForm("decodes", 2, captures=True)


@pytest.fixture
def graphed_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """The second rank has no room for two tokens, and the first none for three."""
    monkeypatch.setenv(FAILS, "3,2")
    monkeypatch.setattr(rank_group, "WORKER", "tests.dist.graphed")
    monkeypatch.setattr(FirstSeat, "runner", graphed(FirstSeat.runner, 0))
    made = RankGroup(2, deadline_s=20.0)
    yield made
    made.close()


def test_ranks_replay_the_same_graphs(
    graphed_group: RankGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a rank replays what another computes kernel by kernel or captures, when one goes on
    to capture what another has no room for, or when a replay gives other bits."""
    folder = tiny_model("llama", tmp_path)
    expected, said = answers(alone(folder)), list[StepForm]()
    tell = graphed_group.tell

    def noted(order: Order, *to: object) -> None:
        if isinstance(order, Step) and order.plan.works:
            assert order.plan.form is not None
            said.append(order.plan.form)
        tell(order, *to)  # type: ignore[arg-type]

    monkeypatch.setattr(graphed_group, "tell", noted)
    with model_on(graphed_group, folder) as llm:
        assert answers(llm) == expected
        graphs = llm._engine.runner.graphs
        assert graphs is not None and isinstance(graphs.memory, JointMemory)
        assert {size for size, *_ in graphs.graphs} == {1}
        assert {size for size, *_ in graphs._too_large} == {2, 3}
        assert graphs.memory.num_replays > 3
    captured = [form.num_tokens for form in said if form.captures]
    assert sorted(captured) == [1, 2, 3], "each was tried once"
    assert {form.kind for form in said} == {"kernels", "decodes"}
    assert all(form.num_tokens == 0 for form in said if form.kind == "kernels")


def test_a_form_crosses_as_it_is() -> None:
    """Red when a rank reads another form than the first one wrote."""
    codec = orders()
    told = codec.decode(codec.frame(Step(StepPlan(form=CAPTURES)))[5:])
    assert isinstance(told, Step) and told.plan.form == CAPTURES


def memory(fails_at: int = 0) -> JointMemory:
    return JointMemory(EagerMemory(fails_at), Ranks(graphed=Launched()), torch.device("cpu"))


def step() -> Decoded:
    return Decoded(torch.zeros(2, 3), torch.zeros(2, 1))


def test_nobody_captures_what_was_not_ordered() -> None:
    """Red when ranks with other graphs than the first one wait for each other in silence."""
    joint = memory()
    with (
        pytest.raises(RuntimeError, match="lacks the graph 2, which others have"),
        joint.step(CAPTURES._replace(captures=False)),
    ):
        joint.capture(step, step, 2)
    with pytest.raises(RuntimeError, match="others have yet to capture"), joint.step(CAPTURES):
        pass


def out_of_memory() -> Decoded:
    raise torch.OutOfMemoryError("played")


@pytest.mark.parametrize("first", [step, out_of_memory], ids=["capture", "step before"])
def test_a_rank_without_memory(first: Callable[[], Decoded]) -> None:
    """Red when a rank that ran out of memory in the middle of a step, where others wait for it,
    goes on as if only its capture had failed."""
    kind = torch.OutOfMemoryError if first is step else RuntimeError
    joint = memory(fails_at=2)
    with pytest.raises(RuntimeError) as raised, joint.step(CAPTURES):
        joint.capture(first, step, 2)
    assert type(raised.value) is kind


def test_an_ended_graph_is_not_replayed() -> None:
    """Red when a graph outlives the way to the others, which what it launches works with."""
    joint = memory()
    with joint.step(CAPTURES):
        graph, _ = joint.capture(step, step, 2)
    graph.replay()
    assert joint.num_replays == 1
    joint.end()
    with pytest.raises(AssertionError, match="after its end"):
        graph.replay()

"""Adapters before a scheduler: who is sent back to the line comes again, and says the same."""

from __future__ import annotations

import pytest

from quire.kv.check import check
from quire.request import BACKGROUND, Request, RequestId
from quire.step import StepPlan
from tests.lora.shelf import Shelf, shelved
from tests.unit.case import Case, Ready, expected


class Adapted(Case):
    """Steps whose requests have no slot are an error."""

    def __init__(self, num_slots: int, *names: str, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.shelf = Shelf()
        self.adapters = self.core.adapters = shelved(self.shelf, num_slots)
        for name in names:
            self.adapters.load(name, f"/{name}")

    def execute(self, plan: StepPlan) -> Ready:
        for work in plan.works:
            request = self.scheduler.running[work.request_id]
            assert request.adapter.number in (0, *self.shelf.held), "a step without weights"
        return super().execute(plan)

    def asked(self, adapter: str, prompt: list[int], max_tokens: int = 8, **more: int) -> Request:
        leader = self.request(prompt, max_tokens, **more)
        for member in (leader, *leader.children):
            member.adapter_name = adapter
        self.core.add(leader)
        return leader


def test_lines_of_a_batch_give_their_slots_up_and_go_on() -> None:
    """Red when a request waits for a batch, or a line of it loses tokens, pages or its place."""
    for overlap in (False, True):
        case = Adapted(1, "a", "b", overlap=overlap)
        lines = [case.asked("a", [1, 2, i], 12, priority=BACKGROUND) for i in range(3)]
        for _ in range(4):
            case.step()
        assert 0 < lines[0].num_output < 12
        visitor = case.asked("b", [5, 6], 6)
        while not case.finishes(visitor.id):
            case.step()
            assert all(line.num_output < 12 for line in lines)
        assert visitor.output == expected(visitor, 6)
        case.run()
        assert [line.output for line in lines] == [expected(line, 12) for line in lines]
        assert all(line.num_preempted == 1 for line in lines)
        case.assert_all_returned()


def test_siblings_give_way_together() -> None:
    """Red when an answer of n > 1 is left behind, whether it had begun or not."""
    for num_steps in (0, 1, 3):
        case = Adapted(1, "a", "b", max_num_batched_tokens=8)
        line = case.asked("a", list(range(1, 7)) * 2, 6, n=3, priority=BACKGROUND)
        family = [line, *line.children]
        for _ in range(num_steps):
            case.step()
        visitor = case.asked("b", [5, 6], 4)
        case.run()
        assert visitor.output == expected(visitor, 4)
        assert [member.output for member in family] == [expected(m, 6) for m in family]
        case.assert_all_returned()
        check(case.kv)


def test_who_is_sent_back_can_be_aborted() -> None:
    case = Adapted(1, "a", "b")
    line = case.asked("a", [1, 2], 12, priority=BACKGROUND)
    case.step()
    case.asked("b", [3], 12)
    case.step()
    assert len(case.adapters) == 1 and [r.id for r in case.core.waiting()] == [line.id]
    assert [event.finish for event in case.abort(line.id)] == ["abort"]
    case.run()
    case.assert_all_returned()
    assert not any(entry.users for entry in case.adapters.entries())
    assert case.core.abort(RequestId(line.id)) == []


def test_an_answer_that_waits_behind_its_parent_can_be_aborted() -> None:
    """Red when the scheduler keeps whose child it was."""
    case = Adapted(1, "a", "b", max_num_seqs=1)
    line = case.asked("a", [1, 2], 6, n=2, priority=BACKGROUND)
    (child,) = line.children
    while not line.num_output:
        case.step()
    visitor = case.asked("b", [5, 6], 4)
    case.step()
    assert [request.id for request in case.core.waiting()] == [line.id, child.id]
    assert [event.finish for event in case.abort(child.id)] == ["abort"]
    case.run()
    assert (visitor.output, line.output) == (expected(visitor, 4), expected(line, 6))
    case.assert_all_returned()


@pytest.mark.parametrize("overlap", [False, True, 2])
def test_who_comes_back_in_the_step_it_was_sent_back_in(overlap: bool | int) -> None:
    """Red when results of a request's first run, still under way, are taken for its second's."""
    case = Adapted(1, "a", "b", overlap=overlap)
    lines = [case.asked("a", [1, 2, i], 12, priority=BACKGROUND) for i in range(3)]
    for _ in range(4):
        case.step()
    case.shelf.contents["/b"] = b"another"  # so its visitor fails, and the lines return at once
    case.asked("b", [5, 6], 6)
    case.run()
    assert [line.output for line in lines] == [expected(line, 12) for line in lines]
    case.assert_all_returned()

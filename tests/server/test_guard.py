"""A request that fails inside the engine fails alone; everyone else gets exactly their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from quire.engine.guard import MAX_FAILURES, MESSAGE, Guard, is_out_of_memory
from quire.step import Pending, StepPlan, StepResult, TokenEvent
from tests.unit.case import Case, expected

POISON = 99
Fault = Callable[[StepPlan], Exception | None]


@dataclass
class Broken:
    """A launched step that will say what went wrong only when it is asked."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


class FaultyRunner:
    """Runs plans on the page-content runner, unless `fault` finds something wrong with them."""

    def __init__(self, case: Case, fault: Fault, is_late: bool) -> None:
        self.case, self.fault, self.is_late = case, fault, is_late

    def execute(self, plan: StepPlan) -> Pending:
        if (error := self.fault(plan)) is not None:
            if self.is_late:
                return Broken(error)
            raise error
        return self.case.execute(plan)


class Guarded:
    """A Case whose steps go through a guard, with a fault planted."""

    def __init__(self, fault: Fault, *, is_late: bool = False, **options: object) -> None:
        self.case = Case(**options)  # type: ignore[arg-type]
        self.case.core.runner = FaultyRunner(self.case, fault, is_late)
        self.guard = Guard(self.case.core)
        self.events: list[TokenEvent] = []

    def run(self, max_steps: int = 3_000) -> None:
        for _ in range(max_steps):
            if not self.case.core.has_work:
                return self.case.assert_all_returned()
            self.step()
        raise AssertionError("no end")

    def step(self) -> None:
        self.events += self.guard.step()

    def tokens(self, id: int) -> list[int]:
        return [t for e in self.events if e.request_id == id for t in e.tokens]

    def finish(self, id: int) -> str | None:
        found = [e for e in self.events if e.request_id == id and e.finish is not None]
        assert len(found) == 1, f"request {id} ended {len(found)} times"
        return found[0].finish


def feeds(token: int) -> Fault:
    """A fault whenever a step feeds this token."""

    def fault(plan: StepPlan) -> Exception | None:
        for a in plan.admissions:
            tokens_of[a.row] = list(a.tokens)
        for work in plan.works:
            known = tokens_of.get(work.row, [])
            if token in known[work.start : work.start + work.num_tokens]:
                return RuntimeError(f"token {token} makes this kernel fail")
        return None

    tokens_of: dict[int, list[int]] = {}
    return fault


PROMPTS = [[1, 2, 3, i, i + 1, 2, 5] * 3 for i in range(6)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("is_late", [False, True], ids=["in the forward", "in the sampler"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}, {"num_pages": 30}])
def test_one_poisoned_request_among_many(
    overlap: bool, is_late: bool, options: dict[str, int]
) -> None:
    """Red when a fault reaches another request: its end, or a single one of its tokens."""
    here = Guarded(feeds(POISON), is_late=is_late, overlap=overlap, **options)
    good = [here.case.add(prompt, max_tokens=9) for prompt in PROMPTS[:3]]
    bad = here.case.add([4, 5, POISON, 6, 1, 2], max_tokens=9)
    good += [here.case.add(prompt, max_tokens=9) for prompt in PROMPTS[3:]]
    here.run()
    assert here.finish(bad.id) == "error"
    assert next(e.error for e in here.events if e.request_id == bad.id) == MESSAGE
    for request in good:
        assert here.tokens(request.id) == expected(request, 9)
        assert here.finish(request.id) == "length"
    assert here.guard.num_faults >= 1
    assert here.case.scheduler.max_running == here.case.config.max_num_seqs
    assert here.case.core.lag == int(overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_fault_in_the_middle_of_an_answer(overlap: bool) -> None:
    """Red when the culprit is only found at its prompt: here it fails from its fifth token on."""
    bad_id = 0

    def fault(plan: StepPlan) -> Exception | None:
        late = any(w.request_id == bad_id and w.start + w.num_tokens > 12 for w in plan.works)
        return ValueError("position 12") if late else None

    here = Guarded(fault, overlap=overlap)
    good = [here.case.add(prompt, max_tokens=12) for prompt in PROMPTS]
    bad = here.case.add([3] * 8, max_tokens=12)
    bad_id = bad.id
    here.run()
    assert here.finish(bad.id) == "error"
    assert here.tokens(bad.id) == expected(bad, 12)[: len(here.tokens(bad.id))]
    for request in good:
        assert here.tokens(request.id) == expected(request, 12)


def test_several_poisoned_requests_and_newcomers_meanwhile() -> None:
    here = Guarded(feeds(POISON))
    good = [here.case.add(prompt, max_tokens=6) for prompt in PROMPTS[:4]]
    bad = [here.case.add([i, POISON, i, 2], max_tokens=6) for i in range(3)]
    for _ in range(4):
        here.step()
    good += [here.case.add(prompt, max_tokens=6) for prompt in PROMPTS[4:]]
    here.run()
    assert [here.finish(r.id) for r in bad] == ["error"] * 3
    for request in good:
        assert here.tokens(request.id) == expected(request, 6)


def test_answers_to_one_poisoned_prompt_all_end() -> None:
    here = Guarded(feeds(POISON))
    bad = here.case.add([1, POISON, 2], max_tokens=4, n=3)
    ids = [bad.id, *(child.id for child in bad.children)]
    good = here.case.add(PROMPTS[0], max_tokens=4)
    here.run()
    assert [here.finish(id) for id in ids] == ["error"] * 3
    assert here.tokens(good.id) == expected(good, 4)


@pytest.mark.parametrize("num_requests", [1, 6])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_once_costs_nobody_anything(num_requests: int, error: Exception) -> None:
    """Red when the batch that was too large takes a request down with it."""
    errors = [error]

    def fault(plan: StepPlan) -> Exception | None:
        return errors.pop() if len(plan.works) == num_requests and errors else None

    here = Guarded(fault)
    made = [here.case.add(prompt, max_tokens=6) for prompt in PROMPTS[:num_requests]]
    here.run()
    assert errors == [] and here.guard.num_faults == 1
    for request in made:
        assert here.tokens(request.id) == expected(request, 6)


def test_a_request_that_never_fits_ends_alone() -> None:
    def fault(plan: StepPlan) -> Exception | None:
        too_large = any(w.request_id == bad.id for w in plan.works)
        return torch.OutOfMemoryError("out of memory") if too_large else None

    here = Guarded(fault)
    good = [here.case.add(prompt, max_tokens=6) for prompt in PROMPTS[:3]]
    bad = here.case.add([1, 2, 3], max_tokens=6)
    here.run()
    assert here.finish(bad.id) == "error"
    for request in good:
        assert here.tokens(request.id) == expected(request, 6)


def test_memory_errors_are_known_by_name() -> None:
    """Red when torch renames the class that the guard looks for."""
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert not is_out_of_memory(RuntimeError("out of memory"))


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("page 3: 2 refs, 1 holders"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        type("AcceleratorError", (RuntimeError,), {})("device lost"),
    ],
)
def test_a_broken_device_or_book_is_not_survived(error: Exception) -> None:
    """Red when the engine goes on with a device or a page table nobody can trust."""
    here = Guarded(lambda plan: error)
    here.case.add(PROMPTS[0])
    with pytest.raises(type(error)):
        here.step()


def test_an_error_in_the_scheduler_is_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a half-entered plan or result is taken for one request's fault."""
    here = Guarded(lambda plan: None)
    here.case.add(PROMPTS[0])
    monkeypatch.setattr(here.case.kv, "reserve", lambda *_, **__: {}["lost"])
    with pytest.raises(KeyError):
        here.step()


def test_when_nothing_works_the_engine_gives_up() -> None:
    """Red when a runner that fails on everyone eats the whole queue, one request at a time."""
    here = Guarded(lambda plan: RuntimeError("broken"))
    for _ in range(MAX_FAILURES + 10):
        here.case.add(PROMPTS[0])
    with pytest.raises(RuntimeError, match="broken"):
        for _ in range(MAX_FAILURES + 10):
            here.step()
    ended = [e for e in here.events if e.finish == "error"]
    assert len(ended) < MAX_FAILURES + 1

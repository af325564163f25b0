"""A step keeps its time: prompts beside decodes are cut by the table of costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.args_check import check_args
from quire.config import EngineArgs
from quire.errors import NotSupported
from quire.resolve import SERVED_GAP_MS, target_gap
from quire.sched.costs import StepCosts
from quire.sched.gap import LEAST_CHUNK, prompt_budget
from quire.step import StepPlan, StepResult
from tests.unit.case import Case, Ready, expected

COSTS = StepCosts.of([(1, 0.001), (1001, 0.101)])  # 100 us a token


@given(
    points=st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-4, 1.0)), min_size=1, max_size=6),
    budget=st.integers(0, 2048),
    decoding=st.integers(0, 256),
    target=st.floats(1e-4, 1.0),
)
def test_the_budget_is_the_largest_that_fits(
    points: list[tuple[int, float]], budget: int, decoding: int, target: float
) -> None:
    """Brute force over all sizes. Red when the search misses where the line bends."""
    costs = StepCosts.of({tokens: (tokens, time) for tokens, time in points}.values())
    found = prompt_budget(budget, decoding, costs, target)
    if decoding == 0:
        assert found == budget
        return
    sizes = range(0, budget + 1, LEAST_CHUNK)
    fits = [size for size in sizes if costs.seconds(decoding + size) <= target]
    assert found == min(budget, max([LEAST_CHUNK, *fits]))


def test_prompts_beside_decodes_are_cut_and_alone_are_not() -> None:
    """8 ms: 70 tokens beside one. Red when decodes wait for a whole prompt, or nobody but it."""
    limits = {"max_num_batched_tokens": 256, "max_model_len": 512, "num_pages": 256}
    case = Case(costs=COSTS, target_gap_ms=8.0, **limits)
    short = case.add([1] * 3, max_tokens=12)
    case.step()
    long = case.add([2] * 400, max_tokens=2)
    case.step()
    assert case.fed() == {short.id: 1, long.id: 64}
    while short.num_output < 12:
        case.step()
        assert sum(case.fed().values()) <= 1 + 64
    alone = case.add([3] * 400, max_tokens=2)
    case.run()
    whole = [case.fed(plan).get(alone.id) for plan in case.plans]
    assert 256 in whole
    assert long.output == expected(long, 2) and alone.output == expected(alone, 2)


def test_prompts_get_on_where_no_time_is_left() -> None:
    """Red when a target below the time of one token starves whoever comes."""
    case = Case(costs=COSTS, target_gap_ms=0.5, max_num_batched_tokens=64)
    case.add([1] * 3, max_tokens=20)
    case.step()
    late = case.add([2] * 40, max_tokens=1)
    for _ in range(3):
        case.step()
        assert case.fed()[late.id] <= LEAST_CHUNK
    assert late.num_output == 1


def test_without_a_target_nothing_is_measured_or_cut() -> None:
    case = Case(max_num_batched_tokens=64)
    first = case.add([1] * 3, max_tokens=4)
    case.step()
    second = case.add([2] * 40)
    case.step()
    assert case.fed() == {first.id: 1, second.id: 40}


def test_whole_prompts_cannot_keep_a_gap() -> None:
    with pytest.raises(NotSupported, match="target_gap_ms=5 with enable_chunked_prefill=False"):
        check_args(EngineArgs(target_gap_ms=5.0, enable_chunked_prefill=False))


def test_what_suits_a_server() -> None:
    """Red when programs or CPUs get a target that nobody asked for, or a server on a GPU none."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    served = EngineArgs(target_gap_ms=None)
    whole = EngineArgs(target_gap_ms=None, enable_chunked_prefill=False)
    check_args(whole)
    assert target_gap(served, gpu) == SERVED_GAP_MS
    assert [target_gap(args, gpu) for args in (EngineArgs(), whole)] == [0.0, 0.0]
    assert target_gap(served, cpu) == 0.0
    drafting = EngineArgs(target_gap_ms=None, speculative_config={"method": "ngram"})
    assert target_gap(drafting, gpu) == 0.0
    assert target_gap(EngineArgs(target_gap_ms=7.0), gpu) == 7.0


class Played(Case):
    """Steps take what `COSTS` says on a machine that is `pace` times as slow."""

    pace = 1.0

    def execute(self, plan: StepPlan) -> Ready:
        self.now += self.pace * COSTS.seconds(max(1, plan.num_tokens))
        return super().execute(plan)


@pytest.mark.parametrize("factor", [0.25, 6.0])
def test_a_table_that_came_out_wrong_heals(factor: float) -> None:
    """Red when chunks stay as small, or as large, as a disturbed start says. 16 ms: 159 tokens."""
    start = StepCosts.of([(1, 0.001), (64, 0.0073 * factor), (1001, 0.101 * factor)])
    limits = {"max_num_batched_tokens": 512, "max_model_len": 2048, "num_pages": 4096}
    case = Played(costs=start, target_gap_ms=16.0, **limits)
    case.add([1] * 3, max_tokens=1000)
    case.step()
    chunks: list[int] = []
    for at in range(60):
        long = case.add([3 + at] * 600, max_tokens=2)
        while long.num_computed < 600:
            case.step()
            chunks.append(case.fed().get(long.id, 0))
    late = [chunk for chunk in chunks[-40:] if chunk not in (0, 1)]
    assert 112 <= max(late) <= 176 and max(chunks[:3]) not in range(112, 177)


@dataclass
class Late:
    """A step on a device of its own, which the host waits for."""

    case: Launching
    value: StepResult
    ends: float

    def result(self) -> StepResult:
        self.case.now = max(self.case.now, self.ends)
        return self.value


class Launching(Case):
    """Steps of decodes take 4 ms, those with prompts as long as to launch them, and as `COSTS`
    says: the host is at it for 18 ms."""

    tells = True
    free_at = 0.0

    def execute(self, plan: StepPlan) -> Late:  # type: ignore[override]
        is_mixed = any(work.num_tokens > 1 for work in plan.works)
        takes = COSTS.seconds(max(1, plan.num_tokens)) if is_mixed else 0.004
        begins = max(self.free_at, self.now)
        self.now += 0.018 if is_mixed else 0.001
        self.free_at = max(begins + takes, self.now)
        value = super().execute(plan).value
        seconds = self.free_at - begins if self.tells else None
        return Late(self, replace(value, seconds=seconds), self.free_at)


def longest_chunk(tells: bool) -> int:
    """Of prompts that come between decodes, one by one."""
    limits = {"max_num_batched_tokens": 4096, "max_model_len": 4096, "num_pages": 8192}
    start = StepCosts.of([(1, 0.004), (101, 0.0141), (1001, 0.101)])
    case = Launching(costs=start, overlap=True, target_gap_ms=50.0, **limits)
    case.tells = tells
    case.add([1] * 3, max_tokens=4000)
    case.step()
    chunks: list[int] = []
    for at in range(40):
        several = at % 8 == 7  # at most times one that fits whole, and then more than fit
        for _ in range(1 if not several else 6):
            case.add([3 + at] * 200, max_tokens=1)
        for _ in range(12):
            case.step()
            chunks.append(sum(case.fed().values()))
    return max(chunks[240:])


def test_what_launching_takes_is_no_news_of_the_device() -> None:
    """50 ms: 491 tokens. A host that launches for longer than a decode takes sees the step behind
    it as shorter, so without the device's word chunks grow. Red when that is believed."""
    assert longest_chunk(tells=False) > 600
    assert longest_chunk(tells=True) <= 520

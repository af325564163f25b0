"""Values that cross seams survive msgspec's msgpack unchanged: other ranks will get them so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.params import SamplingParams, StructuredOutputsParams
from quire.step import (
    Admission,
    PageCopy,
    PageWrite,
    StepPlan,
    StepResult,
    TokenEvent,
    TokenLogprobs,
    Work,
)
from tests.unit.case import Case

PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    seed=-(2**63),
    max_tokens=None,
    min_tokens=3,
    stop=["a", "b"],
    stop_token_ids=[1, 2],
    logprobs=0,
    prompt_logprobs=4,
    logit_bias={3: -100.0, 70000: 5.5},
    allowed_token_ids=[1, 3],
    bad_words=["x"],
    bad_word_ids=((1, 2), (3,)),
    structured_outputs=StructuredOutputsParams(json={"type": "object"}),
)
RECORD = TokenLogprobs(5, -0.25, 1, (5, 6), (-0.25, -1.5))
VALUES: list[Any] = [
    StepPlan(),
    StepPlan(
        works=(
            Work(1, 0, 0, 7, False),
            Work(2**40, 3, 9, 1, True),
            Work(2, 1, 9, 4, True, 3, (5, 6, 7), (0, 0, 1)),
        ),
        admissions=(Admission(1, 0, [5, 6, 7], 2, PARAMS, 2**63 - 1, (2, 3)),),
        page_writes=(PageWrite(0, 1, 2),),
        page_copies=(PageCopy(4, 5),),
    ),
    StepResult([]),
    StepResult([[5], []], [[RECORD], []], {1: [RECORD, RECORD]}, {0: [0.5]}, {1: "why"}, {0: [2]}),
    TokenEvent(1, [5, 6]),
    TokenEvent(1, [5], "stop", 5, [RECORD], [RECORD], 3, [0.5, -1.0], "what went wrong"),
    TokenEvent(1, [5], "stop", "a stop string"),
    PARAMS,
]


def wired(value: Any) -> Any:
    """What arrives on the other side. A sequence may arrive as a list, its items unchanged."""
    data = msgspec.msgpack.encode(value)
    again = msgspec.msgpack.decode(data, type=type(value))
    assert type(again) is type(value)
    assert msgspec.msgpack.encode(again) == data
    return again


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_round_trip(value: Any) -> None:
    """Red when a field's type is one msgspec cannot encode, or decodes to something else."""
    wired(value)


def test_nested_values_keep_their_types() -> None:
    """Red when an annotation is loosened and the other side gets plain lists."""
    plan, result, event = wired(VALUES[1]), wired(VALUES[3]), wired(VALUES[5])
    assert plan == VALUES[1]
    assert [type(x) for x in (plan.works[0], plan.admissions[0], plan.page_writes[0])] == [
        Work,
        Admission,
        PageWrite,
    ]
    assert plan.admissions[0].params == PARAMS
    assert result == VALUES[3]
    assert event == VALUES[5]


def test_real_plans_and_results_round_trip() -> None:
    """Red when the scheduler or runner puts an array, a set or an object into a plan."""
    case = Case(num_pages=14, overlap=True, max_num_batched_tokens=9)
    for i in range(4):
        case.add([i, *range(7)] * 2, max_tokens=9, n=2, stop_token_ids=(99,), min_tokens=1)
    results = []
    plain = case.runner.execute

    def execute(plan: StepPlan) -> Any:
        ready = plain(wired(plan))  # the runner gets what came through the wire
        results.append(ready.result())
        return ready

    case.runner.execute = execute
    case.run()
    assert case.scheduler.stats().num_preempted > 0
    assert any(plan.page_copies for plan in case.plans)
    for value in (*results, *case.events):
        wired(value)


def test_values_are_frozen() -> None:
    """Red when a plan can be changed after it was made: ranks would disagree. The params in it are
    the engine's own copy of the caller's (`test_params.py`)."""
    for value, name in ((StepPlan(), "works"), (StepResult([]), "sampled")):
        with pytest.raises(AttributeError):
            setattr(value, name, ())
    with pytest.raises(AttributeError):
        TokenEvent(1, []).finish = "stop"

"""The search: what it finds is the best there is, and what it leaves out could not be better."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from quire.bench.serve.figures import Promise
from quire.bench.serve.work import asks, poisson_times
from quire.cli.main import main
from quire.sim.devices import DEVICES
from quire.sim.engine import SimEngine
from quire.sim.estimate import Layout
from quire.sim.outside import Link
from quire.sim.plan import Answer, Offered, Option, Question, answer, engine_on, search
from quire.sim.tables import Source
from tests.sim.tables import table

PRICES = {"h200": 3.5, "rtx4090": 0.4}


def load(rate: float, count: int = 30) -> Offered:
    return Offered(rate, asks(poisson_times(count, rate, 1, 0), [(600, 12)] * count, 0))


def question(**changes: object) -> Question:
    values = {
        "source": Source.of("h200-8b", None, None),
        "devices": [DEVICES["rtx4090"]],
        "most": 4,
        "loads": [load(4.0), load(16.0)],
        "promise": Promise.parse("ttft=250"),
        "prices": PRICES,
        "settle": short,
    }
    return Question(**values | changes)  # type: ignore[arg-type]


def short(engine: SimEngine) -> SimEngine:
    return replace(engine, sched=replace(engine.sched, max_model_len=1024))


def exhaustive(asked: Question) -> list[Answer]:
    """Everything there is, one by one, with nothing left out."""
    helpers = range(4) if asked.apart else (0,)
    found = []
    for device in asked.devices:
        for tp in (1, 2, 4):
            for pp in (1, 2, 4):
                for replicas, prefill in product((1, 2, 3, 4), helpers):
                    if tp * pp * (replicas + prefill) <= asked.most:
                        layout = Layout(tp, pp)
                        engine = engine_on(asked, device, layout)
                        option = Option(device, layout, replicas, prefill)
                        found.append(answer(asked, engine, option))
    return found


@pytest.mark.parametrize("apart, count", [(None, 11), (Link(25e9), 19)])
def test_the_best_is_the_best_of_all(apart: Link | None, count: int) -> None:
    """Red when the search leaves out an option that is better than what it found."""
    asked = question(apart=apart)
    plan, every = search(asked), exhaustive(asked)
    # Up to four of one device, two of two in two ways, one of four in three; apart each in all
    # ways to part them, of which one alone has none.
    assert len(every) == count
    best = max(one.goodput for one in every)
    top = plan.by_goodput()[0]
    assert top.goodput == best
    assert top.price == min(one.price for one in every if one.goodput == best)
    assert 0 < min(one.goodput for one in every) < best  # there was something to choose
    cheapest = min(one.cost for one in every if one.cost is not None)
    assert plan.by_cost()[0].cost == cheapest


def test_replicas_that_could_gain_nothing_are_left_out() -> None:
    """Red when the search simulates what cannot be better."""
    asked = question(loads=[load(1.0, 10)], promise=Promise.parse("ttft=5000"))
    plan = search(asked)
    assert {one.option.replicas for one in plan.answers} == {1}
    assert plan.by_goodput()[0].option.num_devices == 1


def test_a_rate_counts_where_enough_keep_the_promise() -> None:
    """Red when a goodput is of a rate at which most requests waited too long."""
    asked = question(loads=[load(1.0, 10), load(2000.0)], most=1)
    (found,) = search(asked).answers
    assert found.rates[1].share < asked.attain
    assert found.best is found.rates[0]
    never = search(question(most=1, promise=Promise.parse("ttft=0.001")))
    assert never.by_goodput() == [] and never.by_cost() == []


def test_what_does_not_fit_is_refused_and_said() -> None:
    """Red when a model is planned on devices that cannot hold it, or it is silently left out."""
    asked = question(source=Source.of("h200-14b", None, None), most=2, loads=[load(1.0, 5)])
    plan = search(asked)
    assert [(one.layout.tp, one.layout.pp) for one in plan.refused] == [(1, 1)]
    assert "weights" in plan.refused[0].why
    assert {str(one.option.layout) for one in plan.answers} == {"tp 2 x pp 1", "tp 1 x pp 2"}


def test_a_budget_limits_devices() -> None:
    """Red when a plan costs more than was allowed."""
    asked = question(devices=[DEVICES["h200"], DEVICES["rtx4090"]], budget=1.25, most=9)
    assert [asked.most_of(device) for device in asked.devices] == [0, 3]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when the plan is not drawn, not labelled, or its flags are not checked."""
    words = ["simulate", "h200-8b", "--plan", "--rate", "3", "--requests", "8", "--devices", "2"]
    out = tmp_path / "plan"
    full = [*words, "--slo", "ttft=2000", "--prices", "h200=3.5,l40s=0.9", "--out", str(out)]
    assert main(full) == 0
    said = capsys.readouterr().out
    record = json.loads(said.splitlines()[-1])
    assert record["best_by_cost"]["device"] == "l40s"
    assert record["best_by_cost"]["costs"] == "scaled"
    labels = {(o["device"], o["devices"]): o["costs"] for o in record["options"]}
    assert labels["h200", 1] == "published"
    assert json.loads(Path(f"{out}.json").read_text()) == record
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")
    costs = tmp_path / "costs.json"
    table().write(costs)
    for wrong, word in (
        (["simulate", str(costs), *full[2:]], "--shape"),
        (["simulate", str(costs), *full[2:], "--shape", "8b"], "--table-device"),
        (words, "--slo"),
        ([*full, "-tp", "2"], "--devices"),
        ([*full, "--prices", "h200=0"], "--prices"),
        ([*full, "--attain", "2"], "--attain"),
        ([*full, "--concurrency", "2"], "--rate"),
        ([*full, "--budget", "0.5"], "0.9"),
        ([*full, "--budget", "9", "--kinds", "h100"], "h100"),
    ):
        assert main(wrong) == 2
        assert word in capsys.readouterr().err

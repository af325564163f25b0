"""Loads of experts: from counters in the model to what a scraper reads."""

from __future__ import annotations

import pytest
import torch

from quire.obs.expert_loads import MAX_SERIES, WINDOW_S, ExpertLoads
from quire.obs.metrics import ServerMetrics
from quire.runner.expert_loads import READ_EVERY_S, LoadReader
from tests.hf import tiny_engine, tiny_model
from tests.model.records import records
from tests.obs.test_metrics import scrape, value


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_from_the_model_to_the_scraper() -> None:
    """Red when a layer's or an expert's number is lost on the way."""
    engine = tiny_engine(tiny_model("qwen3-moe-mixed"))
    reader = LoadReader.of(engine.runner.model)
    assert reader is not None
    records(engine, [[5, 6, 7]])
    reader.poll()
    reader.poll()
    taken = reader.take()
    assert list(taken) == [3] and sum(taken[3]) == 2 * (3 + 7)  # of four layers one is sparse
    metrics = ServerMetrics("tiny", 100)
    metrics.experts(taken, pid=1)
    for expert, count in enumerate(taken[3]):
        got = value(metrics, "quire:expert_tokens_total", layer="3", expert=str(expert))
        assert got == count
    mean = sum(taken[3]) / 4
    got = value(metrics, "quire:expert_imbalance", layer="3")
    assert got == pytest.approx(max(taken[3]) / mean, abs=1e-4)
    assert value(metrics, "quire:experts_idle", layer="3") == taken[3].count(0)
    found = metrics.summary()["experts"]
    assert found["worst_layer"] == 3 and found["worst_imbalance"] == got


def test_models_without_experts_expose_nothing() -> None:
    assert LoadReader.of(tiny_engine(tiny_model("llama-gqa")).runner.model) is None
    metrics = ServerMetrics("tiny", 100)
    assert not [name for name, _ in scrape(metrics) if name.startswith("quire:expert")]
    assert metrics.summary()["experts"] is None


def test_the_reader_is_seldom_and_says_nothing_twice(clock: Clock) -> None:
    """Red when every step copies, or an idle engine sends the same counts for ever."""
    counters = torch.zeros(1, 2, dtype=torch.int64)
    reader = LoadReader(counters, [0], clock)
    reader.poll()
    counters += 1  # after the copy was made: not part of this reading
    reader.poll()
    assert reader.take() == {0: [0, 0]}
    for _ in range(10):
        reader.poll()
    assert reader.take() == {}, "before its time"
    clock.now += READ_EVERY_S
    reader.poll()
    reader.poll()
    assert reader.take() == {0: [1, 1]}
    clock.now += READ_EVERY_S
    reader.poll()
    reader.poll()
    assert reader.take() == {}, "nothing new"


def test_balance_is_of_the_last_minute(clock: Clock) -> None:
    """Red when an old imbalance hides a new one, or idle experts are those since the start."""
    loads = ExpertLoads(clock)
    loads.update({0: [100, 0], 1: [10, 10]}, pid=1)
    assert loads.recent()[0] == (2.0, 1) and loads.recent()[1] == (1.0, 0)
    for _ in range(13):
        clock.now += WINDOW_S / 12
        loads.update({0: [100, 0], 1: [10, 10]}, pid=1)
    assert loads.recent() == {}, "nothing came in the last minute"
    loads.update({0: [130, 10], 1: [10, 10]}, pid=1)
    assert loads.recent() == {0: (1.5, 0)}
    clock.now += WINDOW_S
    assert loads.recent() == {}, "also when the engine falls silent"
    assert loads.summary() is None


def test_totals_never_fall(clock: Clock) -> None:
    """Red when a restarted engine's counts replace those before it, or are added twice."""
    loads = ExpertLoads(clock)
    loads.update({2: [5, 1]}, pid=1)
    loads.update({2: [7, 1]}, pid=1)
    loads.update({2: [1, 1]}, pid=2)
    loads.update({2: [0, 3]}, pid=2)  # the same pid once more, but a new process
    assert loads.series() == {("2", "0"): 8, ("2", "1"): 5}


def test_many_experts_are_told_by_layer_only(clock: Clock) -> None:
    """Red when a large model floods the scraper."""
    loads = ExpertLoads(clock)
    loads.update({layer: [1] * 256 for layer in range(8)}, pid=1)
    assert len(loads.series()) == MAX_SERIES
    loads.update({layer: [1] * 256 for layer in range(9)}, pid=1)
    assert loads.series() == {} and len(loads.recent()) == 9

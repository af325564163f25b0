"""The two JSON readings: a summary for people, and the page's live part."""

from __future__ import annotations

import json

import pytest

from quire.obs.metrics import FinishReport, ServerMetrics
from quire.obs.totals import Rates


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_summary() -> None:
    """Red when the JSON for people says something else than the scrape."""
    clock = Clock()
    metrics = ServerMetrics("tiny", 1000, clock=clock)
    empty = metrics.summary()
    assert empty["average_latency_s"]["ttft"] is None and empty["average_batch_size"] == 0
    metrics.accepted(n=1, max_tokens=8, prompt_tokens=10)
    metrics.first_token(0.2)
    metrics.first_token(0.4)
    metrics.tokens(50, None)
    metrics.finished(FinishReport("stop", 10, 4, 5, 1.2, 0.2, 0.4, 0.6))
    metrics.rejected("bad_request")
    counts = {"num_steps": 20, "num_fed_tokens": 90, "num_output_tokens": 50, "num_running": 3}
    metrics.engine(counts, pid=1)
    clock.now += 10
    summary = metrics.summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["uptime_s"] == 10
    assert summary["requests"]["finished"]["stop"] == 1
    assert summary["requests"]["rejected"] == {"bad_request": 1}
    assert summary["requests"]["running"] == 3
    assert summary["tokens"] == {"prompt": 10, "cached": 4, "generated": 50, "recomputed": 0}
    assert summary["average_latency_s"]["ttft"] == 0.3
    assert summary["tokens_per_s"]["average"] == 5
    assert (summary["average_batch_size"], summary["average_step_tokens"]) == (2.5, 4.5)


def test_live_rates_are_recent() -> None:
    """Red when a busy minute long ago still shows as speed, or a burst does not show."""
    clock = Clock()
    metrics = ServerMetrics("tiny", 1000, clock=clock)
    for _ in range(50):  # five busy seconds, looked at ten times a second
        clock.now += 0.1
        metrics.tokens(10, 0.01)
        live = metrics.live()
    assert live["tokens_per_s"] == pytest.approx(100, rel=0.05)
    assert json.loads(json.dumps(live)) == live
    assert live["itl"]["counts"][live["itl"]["le"].index(0.01)] == 50
    assert len(live["itl"]["counts"]) == len(live["itl"]["le"]) + 1
    for _ in range(60):
        clock.now += 0.1
        live = metrics.live()
    assert live["tokens_per_s"] == 0
    assert metrics.live()["open_streams"] == 0


def test_rates_of_the_same_moment() -> None:
    """Red when two looks at one clock reading divide by zero."""
    rates = Rates(Clock())
    assert rates.read(1.0) == (0.0,)
    assert rates.read(5.0) == (0.0,)

"""The page of metrics and the Grafana boards, against what the server really exposes."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.obs.metrics import ServerMetrics
from quire.obs.metrics_doc import render
from quire.obs.table import METRICS
from tests.rules.source import ROOT

BOARDS = sorted((ROOT / "docs" / "grafana").glob("*.json"))


def exposed_names() -> set[str]:
    metrics = ServerMetrics("tiny", 100)
    metrics.rejected("queue_full")
    metrics.http("/health", 200, 0.1)
    metrics.answer_cache("exact")
    metrics.routed("rule")
    metrics.experts({0: [3, 1]}, pid=1)
    metrics.engine(
        {"rank_imbalance_before": 1.5, "rank_imbalance_after": 1.2, "num_rebalances": 1}, pid=1
    )
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {sample.name for family in families for sample in family.samples}


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_the_page_is_fresh() -> None:
    """Red when the table changes and docs/metrics.md does not."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text == render(), "run: python -m quire.obs.metrics_doc > docs/metrics.md"
    assert all(f"`quire:{metric.sample_name}`" in text for metric in METRICS)


def test_names_are_unique() -> None:
    """Red when two rows of the table would write one series."""
    names = [metric.sample_name for metric in METRICS]
    assert len(set(names)) == len(names)


def test_there_are_two_boards() -> None:
    assert [path.stem for path in BOARDS] == ["engine", "requests"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_ask_for_metrics_that_exist(path: Any) -> None:
    """Red when a metric is renamed and a panel stays empty for ever."""
    board = json.loads(path.read_text())
    expressions = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    asked = {name for text in strings(board) for name in re.findall(r"\b\w+:\w+", text)}
    asked = {name for name in asked if not name.startswith("http")}
    assert asked - exposed_names() == set()
    assert all("quire:" in expression for expression in expressions)
    for expression in expressions:  # a counter without rate is a slope nobody can read
        for name in re.findall(r"quire:\w+_(?:total|bucket|sum|count)\b", expression):
            assert re.search(rf"(rate|increase)\({name}\{{", expression), expression
        assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_import_cleanly(path: Any) -> None:
    """Red when a board pins somebody's data source, or two panels overlap."""
    board = json.loads(path.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert all(panel["description"] for panel in panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )


def test_the_boards_show_every_metric_of_ours() -> None:
    """Red when a new metric is added and no board shows it, unless it is listed here."""
    unseen_on_purpose = {
        "build_info",  # the list of servers is made from it
        "request_params_n",
        "request_params_max_tokens",
        "request_time_per_output_token_seconds",  # told apart from gaps only with drafts
        "request_inference_time_seconds",  # prefill and decode are shown
    }
    text = "".join(path.read_text() for path in BOARDS)
    unseen = {m.name for m in METRICS if not re.search(rf"quire:{m.name}(_|\b)", text)}
    assert unseen <= unseen_on_purpose

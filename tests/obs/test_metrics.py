"""What a scraper reads: parsed by the Prometheus client's own parser, against counts made here."""

from __future__ import annotations

import random
import subprocess
import sys
import timeit
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ClientHistogram
from prometheus_client.parser import text_string_to_metric_families

from quire.obs.histogram import Histogram
from quire.obs.metrics import FinishReport, ServerMetrics
from quire.obs.table import METRICS, REQUEST_EDGES, TOKEN_EDGES, length_edges
from quire.obs.totals import MAX_SERIES, EngineTotals
from tests.unit.case import Case

SHARED_LABELS = {"model_name": "tiny", "engine": "0"}

# The family of names existing boards and autoscalers ask for.
VLLM_SERIES = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:iteration_tokens_total_bucket",
}

Labels = frozenset[tuple[str, str]]


def scrape(metrics: ServerMetrics) -> dict[tuple[str, Labels], float]:
    """(sample name, labels) -> value; fails on a doubled series."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, f"{key} appears twice"
            found[key] = sample.value
    return found


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return scrape(metrics)[name, frozenset(labels.items())]


def family_value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    """The same figure under both prefixes."""
    ours = value(metrics, f"quire:{name}", **SHARED_LABELS, **labels)
    assert ours == value(metrics, f"vllm:{name}", **SHARED_LABELS, **labels)
    return ours


def report(**changes: object) -> FinishReport:
    known = FinishReport("stop", 10, 4, 5, e2e_s=1.2, queue_s=0.2, prefill_s=0.4, decode_s=0.6)
    return known._replace(**changes)


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics("tiny", max_model_len=1000)


# ---------------------------------------------------------------- names


def test_every_row_of_the_table_is_exposed(metrics: ServerMetrics) -> None:
    """Red when a metric is listed and documented but never written, or the other way round."""
    metrics.rejected("queue_full")
    metrics.http("/v1/models", 200, 0.01)
    metrics.answer_cache("exact")
    metrics.routed("rule")
    metrics.experts({0: [3, 1]}, pid=1)
    metrics.engine(
        {"num_rebalances": 1, "rank_imbalance_before": 1.5, "rank_imbalance_after": 1}, 1
    )
    names = {name for name, _ in scrape(metrics) if name.startswith("quire:")}
    want = set()
    for metric in METRICS:
        name = f"quire:{metric.sample_name}"
        if metric.kind == "histogram":
            want |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
        else:
            want.add(name)
    assert names == want


def test_vllm_names_can_be_had_or_not(metrics: ServerMetrics) -> None:
    """Red when a board written for vLLM loses a series, or the switch does not switch."""
    names = {name for name, _ in scrape(metrics)}
    assert names >= VLLM_SERIES
    assert {n for n in names if n.startswith("vllm:")} == VLLM_SERIES | {
        n.removesuffix("bucket") + part
        for n in VLLM_SERIES
        if n.endswith("_bucket")
        for part in ("count", "sum")
    }
    alone = ServerMetrics("tiny", 1000, vllm_names=False)
    assert not [name for name, _ in scrape(alone) if not name.startswith("quire:")]


def test_vllm_series_have_vllm_buckets(metrics: ServerMetrics) -> None:
    """Red when our finer buckets leak into the family, or one of its edges goes missing."""
    metrics.tokens(1, 0.004)
    metrics.tokens(1, 0.02)
    metrics.finished(report())
    found = scrape(metrics)

    def edges(name: str) -> dict[float, float]:
        return {
            float(dict(labels)["le"]): count
            for (sample, labels), count in found.items()
            if sample == f"{name}_bucket"
        }

    itl = edges("vllm:inter_token_latency_seconds")
    assert set(itl) == {*TOKEN_EDGES, float("inf")}
    assert (itl[0.01], itl[0.025], itl[float("inf")]) == (1, 2, 2)
    fine = edges("quire:inter_token_latency_seconds")
    assert (fine[0.003], fine[0.005], fine[0.01]) == (0, 1, 1)
    assert set(edges("vllm:e2e_request_latency_seconds")) == {*REQUEST_EDGES, float("inf")}
    assert set(edges("vllm:request_prompt_tokens")) == {
        *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
        float("inf"),
    }
    assert length_edges(4096)[-3:] == (500, 1000, 2000)
    assert length_edges(0)[-2:] == (50_000, 100_000), "not known yet: room for any model"


def test_strange_names_are_escaped() -> None:
    """Red when a model's name can break out of its label."""
    name = 'a"b\\c\nquire:fake 1'
    metrics = ServerMetrics(name, 100)
    assert dict(next(iter(scrape(metrics)))[1])["model_name"] == name
    assert b"\nquire:fake" not in metrics.exposition()


# ---------------------------------------------------------------- values


def test_a_request_from_start_to_end(metrics: ServerMetrics) -> None:
    """Red when a figure lands under another name, is counted twice or not at all."""
    metrics.accepted(n=2, max_tokens=16, prompt_tokens=10)
    metrics.accepted(n=1, max_tokens=None, prompt_tokens=7)
    metrics.first_token(0.3)
    metrics.tokens(1, None)
    for _ in range(4):
        metrics.tokens(2, 0.15)
    metrics.finished(report())
    metrics.finished(report(reason="length", output_tokens=1, decode_s=0.0))
    metrics.finished(report(reason="abort", queue_s=None, prefill_s=None, decode_s=None))
    assert family_value(metrics, "prompt_tokens_total") == 17
    assert family_value(metrics, "generation_tokens_total") == 9
    for reason, count in {"stop": 1, "length": 1, "abort": 1, "error": 0}.items():
        assert family_value(metrics, "request_success_total", finished_reason=reason) == count
    want = {
        "request_params_n": (2, 3),
        "request_params_max_tokens": (1, 16),
        "time_to_first_token_seconds": (1, 0.3),
        "inter_token_latency_seconds": (4, 0.6),
        "e2e_request_latency_seconds": (3, 3.6),
        "request_queue_time_seconds": (2, 0.4),
        "request_prefill_time_seconds": (2, 0.8),
        "request_decode_time_seconds": (2, 0.6),
        "request_inference_time_seconds": (2, 1.4),
        "request_time_per_output_token_seconds": (1, 0.15),  # one token alone has no rate
        "request_prompt_tokens": (3, 30),
        "request_generation_tokens": (3, 11),
    }
    for name, (count, total) in want.items():
        assert family_value(metrics, f"{name}_count") == count, name
        assert family_value(metrics, f"{name}_sum") == pytest.approx(total), name
    assert value(metrics, "quire:requests_accepted_total") == 2


def test_the_server_side_counters(metrics: ServerMetrics) -> None:
    """Red when refusals, answers or open streams are lost or mixed up."""
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    metrics.rejected("unauthorized")
    metrics.http("/v1/models", 200, 0.002)
    metrics.http("/v1/models", 401, 0.001)
    metrics.http("/health", 200, 0.001)
    metrics.disconnected()
    metrics.engine_restarted()
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    assert value(metrics, "quire:requests_rejected_total", reason="queue_full") == 2
    assert value(metrics, "quire:requests_rejected_total", reason="unauthorized") == 1
    assert value(metrics, "quire:http_requests_total", route="/v1/models", status="401") == 1
    assert value(metrics, "quire:http_request_seconds_count", route="/v1/models") == 2
    assert value(metrics, "quire:http_request_seconds_count", route="/health") == 1
    assert value(metrics, "quire:client_disconnects_total") == 1
    assert value(metrics, "quire:engine_restarts_total") == 1
    assert value(metrics, "quire:open_streams") == 1


def test_series_are_bounded(metrics: ServerMetrics) -> None:
    """Red when a client that asks for many paths can fill the server's memory with labels."""
    for index in range(3 * MAX_SERIES):
        metrics.http(f"/{index}", 404, 0.001)
        metrics.rejected(f"reason {index}")
    found = scrape(metrics)
    for name in ("http_requests_total", "http_request_seconds_count", "requests_rejected_total"):
        series = {labels: count for (n, labels), count in found.items() if n == f"quire:{name}"}
        assert len(series) <= MAX_SERIES + 1
        assert sum(series.values()) == 3 * MAX_SERIES, "nothing goes uncounted"
    other = frozenset({("route", "other"), ("status", "other")})
    assert found["quire:http_requests_total", other] == 2 * MAX_SERIES


def random_traffic(rng: random.Random, metrics: ServerMetrics) -> Iterator[None]:
    while True:
        metrics.accepted(n=rng.randint(1, 30), max_tokens=rng.randint(1, 2000), prompt_tokens=3)
        metrics.first_token(10 ** rng.uniform(-4, 4))
        metrics.tokens(1, 10 ** rng.uniform(-4, 3))
        metrics.finished(report(e2e_s=10 ** rng.uniform(-4, 5), output_tokens=rng.randint(0, 3000)))
        metrics.http("/x", 200, 10 ** rng.uniform(-4, 4))
        yield


def test_histograms_are_consistent(metrics: ServerMetrics) -> None:
    """Red when buckets fall, the last one is not the count, or a sum goes missing."""
    traffic = random_traffic(random.Random(1), metrics)
    for _ in range(300):
        next(traffic)
    found = scrape(metrics)
    buckets: dict[tuple[str, Labels], list[tuple[float, float]]] = {}
    for (name, labels), count in found.items():
        if name.endswith("_bucket"):
            rest = frozenset(item for item in labels if item[0] != "le")
            edge = float(dict(labels)["le"])
            buckets.setdefault((name.removesuffix("_bucket"), rest), []).append((edge, count))
    assert len(buckets) > 25
    for (name, labels), pairs in buckets.items():
        assert pairs == sorted(pairs), name
        counts = [count for _, count in pairs]
        assert counts == sorted(counts), name
        assert pairs[-1] == (float("inf"), found[f"{name}_count", labels]), name
        assert f"{name}_sum" in {n for n, _ in found}


def test_buckets_agree_with_the_client_library() -> None:
    """Red when a value on an edge, or beyond the last, is counted in another bucket than theirs."""
    edges, rng = (0.1, 0.5, 1.0, 10.0), random.Random(2)
    ours, registry = Histogram(edges), CollectorRegistry()
    theirs = ClientHistogram("x", "x", buckets=edges, registry=registry)
    for number in [*edges, 0.0, 11.0, *(10 ** rng.uniform(-2, 2) for _ in range(500))]:
        ours.observe(number)
        theirs.observe(number)
    (family,) = registry.collect()
    want = [sample.value for sample in family.samples if sample.name == "x_bucket"]
    assert ours.cumulative() == want
    assert ours.cumulative((0.5, 10.0)) == [want[1], want[3], want[4]]
    assert ours.mean == pytest.approx(ours.total / len([*edges, 0.0, 11.0, *range(500)]))


# ---------------------------------------------------------------- the engine


def test_gauges_follow_the_engine(metrics: ServerMetrics) -> None:
    """Red when a key of the engine's counts is renamed on one side only."""
    case = Case(num_pages=16, max_num_batched_tokens=16, max_num_seqs=3)
    for base in (0, 1, 0, 2):
        case.add(list(range(base, base + 11)), 20)
    for _ in range(8):
        case.step()
    stats = case.scheduler.stats()
    metrics.engine(stats.as_dict(), pid=1)
    assert stats.num_running and stats.num_waiting and stats.prefix_hit_tokens
    assert family_value(metrics, "num_requests_running") == stats.num_running
    assert family_value(metrics, "num_requests_waiting") == stats.num_waiting
    assert family_value(metrics, "kv_cache_usage_perc") == round(stats.kv_usage, 4)
    assert family_value(metrics, "prefix_cache_queries_total") == stats.prefix_query_tokens
    assert family_value(metrics, "prefix_cache_hits_total") == stats.prefix_hit_tokens
    assert value(metrics, "quire:engine_steps_total") == stats.num_steps
    assert value(metrics, "quire:kv_pages", state="live") == stats.pages_live
    assert value(metrics, "quire:kv_pages", state="cached") == stats.pages_cached
    assert value(metrics, "quire:kv_pages", state="empty") == stats.pages_empty
    assert family_value(metrics, "iteration_tokens_total_count") == stats.num_steps
    assert family_value(metrics, "iteration_tokens_total_sum") == stats.num_fed_tokens
    case.run()
    metrics.engine(case.scheduler.stats().as_dict(), pid=1)
    assert case.scheduler.stats().num_preempted, "the pool was meant to be too small"
    assert family_value(metrics, "num_preemptions_total") == case.scheduler.stats().num_preempted
    metrics.engine({**case.scheduler.stats().as_dict(), "num_recomputed_tokens": 33}, pid=1)
    assert value(metrics, "quire:tokens_recomputed_total") == 33


def test_ranks_and_moved_experts_are_told(metrics: ServerMetrics) -> None:
    """Red when nobody sees that experts move, or a model without copies has an imbalance of 0."""
    metrics.engine({"num_ranks": 4}, pid=1)
    assert value(metrics, "quire:ranks") == 4
    assert "quire:rank_imbalance{" not in metrics.exposition().decode()
    told = {"rank_imbalance_before": 1.75, "rank_imbalance_after": 1.25, "num_experts_copied": 3}
    metrics.engine({"num_rebalances": 2, "num_experts_read": 5, **told}, pid=1)
    metrics.engine({"num_rebalances": 1, "num_experts_read": 1, **told}, pid=2)  # started anew
    assert value(metrics, "quire:expert_rebalances_total") == 3
    assert value(metrics, "quire:experts_read_total") == 6
    assert value(metrics, "quire:experts_copied") == 3
    assert value(metrics, "quire:rank_imbalance", homes="before") == 1.75
    assert value(metrics, "quire:rank_imbalance", homes="after") == 1.25


def test_counters_never_fall_when_the_engine_restarts(metrics: ServerMetrics) -> None:
    """Red when a crash makes a total start from zero again, or its past is added twice."""
    rng = random.Random(4)
    counters = {f"quire:{m.sample_name}" for m in METRICS if m.kind == "counter"}
    before: dict[tuple[str, Labels], float] = {}
    lived = 0
    for pid in (10, 11, 12, 10):  # process ids come round again
        counts = {"num_steps": 0, "num_fed_tokens": 0, "num_preempted": 0, "prefix_hit_tokens": 0}
        for _ in range(5):
            for key in counts:
                counts[key] += rng.randint(0, 5)
            metrics.engine(counts, pid)
            metrics.engine(counts, pid)  # a report that says nothing new adds nothing
            now = {key: v for key, v in scrape(metrics).items() if key[0] in counters}
            assert all(now[key] >= old for key, old in before.items())
            before = now
        lived += counts["num_steps"]
        metrics.engine_restarted()
        assert family_value(metrics, "num_requests_running") == 0
    assert value(metrics, "quire:engine_steps_total") == lived
    assert value(metrics, "quire:engine_restarts_total") == 4


def test_totals_of_a_recycled_pid() -> None:
    """Red when a new engine with the old one's pid makes a total fall."""
    totals = EngineTotals()
    totals.update({"num_steps": 100}, pid=7)
    assert totals.update({"num_steps": 2}, pid=7) == {"num_steps": 2}
    assert totals["num_steps"] == 102


def test_totals_of_a_busier_successor() -> None:
    """Red when a new engine that has already done more than the old one passes for the old one."""
    totals = EngineTotals()
    totals.update({"num_steps": 10}, pid=7)
    assert totals.update({"num_steps": 25}, pid=8) == {"num_steps": 25}
    assert totals["num_steps"] == 35


# ---------------------------------------------------------------- cost


def test_counting_a_streamed_event_is_cheap(metrics: ServerMetrics) -> None:
    """Red when the hot path starts to take locks, label lookups or clock readings."""
    code, names = "tokens(1, 0.012)", {"tokens": metrics.tokens}
    best = min(timeit.repeat(code, globals=names, number=20_000, repeat=5)) / 20_000
    assert best < 2e-6, f"{best * 1e6:.2f} microseconds"  # 0.25 on a quiet machine


def test_the_client_library_is_imported_when_first_scraped() -> None:
    """Red when start-up pays for, or requires, a library that only /metrics needs."""
    code = (
        "import sys; from quire.obs.metrics import ServerMetrics\n"
        "import quire.obs.log, quire.obs.trace\n"
        "m = ServerMetrics('m', 10); m.tokens(1, 0.1); m.summary(); m.live()\n"
        "heavy = {'prometheus_client', 'opentelemetry', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "sys.modules['prometheus_client'] = None\n"
        "from quire.errors import NotSupported\n"
        "try: m.exposition()\n"
        "except NotSupported as error: assert 'pip install prometheus-client' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_processes_add_up_and_the_engine_counts_once() -> None:
    """Red when a histogram or a label is left out of the sum, or engine totals are added twice."""
    one, two = (ServerMetrics("tiny", 64) for _ in range(2))
    for metrics, steps in ((one, 10.0), (two, 7.0)):
        metrics.accepted(n=1, max_tokens=4, prompt_tokens=5)
        metrics.first_token(0.05)
        metrics.tokens(2, 0.01)
        metrics.http("/v1/completions", 200, 0.1)
        metrics.rejected("queue_full")
        metrics.stream_opened()
        metrics.engine({"num_steps": steps, "num_fed_tokens": 4 * steps}, pid=1)
    both = one.joined([two.state()])
    other_way = two.joined([one.state()])
    for reading in (both, other_way):
        summary = reading.summary()
        assert summary["requests"]["accepted"] == 2 and summary["tokens"]["generated"] == 4
        assert summary["engine"]["steps"] == 10 and summary["open_streams"] == 2
        text = reading.exposition().decode()
        assert 'quire:http_requests_total{route="/v1/completions",status="200"} 2.0' in text
        assert "quire:iteration_tokens_total_count" in text
        counts = [line for line in text.splitlines() if "iteration_tokens_total_count" in line]
        assert counts and all(line.endswith(" 10.0") for line in counts)
    assert one.summary()["requests"]["accepted"] == 1, "a reading changes nothing"
    again = ServerMetrics("tiny", 64)
    again.restore(one.state())
    assert again.summary()["requests"]["accepted"] == 1 and again.summary()["open_streams"] == 0
    assert again.summary()["tokens_per_s"]["recent"] == 0.0

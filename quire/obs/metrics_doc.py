"""docs/metrics.md, made from the table of metrics.

python -m quire.obs.metrics_doc > docs/metrics.md
"""

from __future__ import annotations

from quire.obs.table import METRICS, Metric

INTRODUCTION = """\
# Metrics

<!-- Made by `python -m quire.obs.metrics_doc > docs/metrics.md` from quire/obs/table.py. -->

`GET /metrics` answers in the Prometheus text format, `GET /v1/metrics` with a summary in JSON.
Every metric below begins with `quire:`. Metrics marked *vLLM* appear a second time under the prefix
`vllm:`, with vLLM's labels and buckets, so that dashboards and autoscalers written for vLLM keep
working.

Metrics marked *vLLM* also carry the labels `model_name` and `engine` (always `0`: there is one
engine). Counters never fall, even when the engine process restarts. Two Grafana dashboards are in
[grafana/](grafana): [engine](grafana/engine.json) and [requests](grafana/requests.json).
"""


def render() -> str:
    """The whole page."""
    rows = ["| metric | type | labels | meaning | |", "|---|---|---|---|---|"]
    rows += [_row(metric) for metric in METRICS]
    buckets = [_buckets(metric) for metric in METRICS if metric.kind == "histogram"]
    return "\n".join([INTRODUCTION, *rows, "", "## Buckets", "", *buckets, ""])


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    mark = "vLLM" if metric.in_vllm else ""
    name = f"`quire:{metric.sample_name}`"
    return f"| {name} | {metric.kind} | {labels} | {metric.help} | {mark} |"


def _buckets(metric: Metric) -> str:
    if metric.edges is None:
        edges = "1, 2, 5, 10, 20, 50 ... up to the longest sequence of the model"
    else:
        edges = ", ".join(f"{edge:g}" for edge in metric.edges)
    if metric.vllm_edges is not None:
        edges += f" (under `vllm:` from {metric.vllm_edges[0]:g} up)"
    return f"- `{metric.name}`: {edges}"


if __name__ == "__main__":
    print(render(), end="")

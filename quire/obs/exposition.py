"""Prometheus text from one reading of the metrics, with the names of `table.py`.

The client library does the writing (escaping, types, help), in a registry of its own. Each metric
appears under `quire:`, and also under `vllm:` where vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from quire.errors import NotSupported
from quire.obs.histogram import Histogram
from quire.obs.table import METRICS, Metric

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

# A single number or histogram, or one for each set of label values.
Value = float | Histogram
Reading = Value | Mapping[tuple[str, ...], Value]

ENGINE = "0"  # vLLM numbers its engines; here there is one


def render(readings: Mapping[str, Reading], model_name: str, prefixes: Sequence[str]) -> bytes:
    """The text of GET /metrics. Raises NotSupported where the client library is missing."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        raise NotSupported(
            "metrics in the Prometheus format need a package that is not installed;"
            " pip install prometheus-client, or read /v1/metrics"
        ) from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TableCollector(readings, model_name, prefixes))
    return generate_latest(registry)


class TableCollector:
    """Hands metric families to the client library; one instance for each scrape."""

    def __init__(
        self, readings: Mapping[str, Reading], model_name: str, prefixes: Sequence[str]
    ) -> None:
        self._readings, self._model_name, self._prefixes = readings, model_name, prefixes

    def describe(self) -> list[Family]:
        return []  # names need no check for doubles: the table is the only source

    def collect(self) -> Iterator[Family]:
        for prefix in self._prefixes:
            for metric in METRICS:
                if prefix == "quire" or metric.in_vllm:
                    yield self._family(prefix, metric)

    def _family(self, prefix: str, metric: Metric) -> Family:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        name, labels = f"{prefix}:{metric.name}", metric.all_labels
        reading = self._readings[metric.name]
        series = reading if isinstance(reading, Mapping) else {(): reading}
        own = (self._model_name, ENGINE) if metric.in_vllm else ()
        if metric.kind == "histogram":
            histograms = HistogramMetricFamily(name, metric.help, labels=labels)
            for values, histogram in series.items():
                assert isinstance(histogram, Histogram), metric.name
                edges = metric.vllm_edges if prefix == "vllm" else None
                buckets = _buckets(histogram, edges)
                histograms.add_metric([*own, *values], buckets, histogram.total)
            return histograms
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(name, metric.help, labels=labels)
        for values, value in series.items():
            assert not isinstance(value, Histogram), metric.name
            family.add_metric([*own, *values], value)
        return family


def _buckets(histogram: Histogram, edges: Sequence[float] | None) -> list[tuple[str, float]]:
    from prometheus_client.utils import floatToGoString

    names = [floatToGoString(edge) for edge in edges or histogram.edges]
    return list(zip([*names, "+Inf"], histogram.cumulative(edges), strict=True))


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Texts of several models, by name, as one: each family once, every series with its model."""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # what is said of it, its series
    for model, text in texts.items():
        name, is_new = b"", False
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                is_new = name not in families
                families.setdefault(name, ([], []))
            if not line.startswith(b"#"):
                families[name][1].append(_labelled(line, model))
            elif is_new:
                families[name][0].append(line)
    return b"".join(b"".join((*said, *series)) for said, series in families.values())


def _labelled(line: bytes, model: str) -> bytes:
    """A series with its model's name, unless it has one."""
    head, brace, rest = line.partition(b"{")
    if b'model_name="' in rest:
        return line
    quoted = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    label = f'model_name="{quoted}"'.encode()
    if brace:
        return head + b"{" + label + b"," + rest
    name, _, value = line.partition(b" ")
    return name + b"{" + label + b"} " + value

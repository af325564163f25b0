"""ServerMetrics: everything the API process counts, and the three ways to read it.

Requests are counted here where clients see them; the engine process sends its own totals now and
then (`engine`). Values are plain numbers and bucket lists, so that counting a streamed event costs
well under a microsecond; names, labels and help are in `table.py`, and `exposition.py` turns a
reading into Prometheus text. One thread only: the event loop's.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.obs.expert_loads import ExpertLoads
from quire.obs.exposition import Reading, render
from quire.obs.histogram import Histogram
from quire.obs.of_engine import of_drafts, of_ranks, of_tiers
from quire.obs.report import FinishReport
from quire.obs.shared import (
    HistogramState,
    MetricsState,
    add_histogram,
    add_labelled,
    labelled,
)
from quire.obs.table import HTTP_EDGES, METRICS, length_edges
from quire.obs.totals import OTHER, EngineTotals, LabelledCounts, Rates
from quire.version import __version__

__all__ = ["FinishReport", "ServerMetrics"]

FINISH_REASONS = ("stop", "length", "abort", "error")
ENGINE_HISTOGRAM = "iteration_tokens_total"
LABELLED = ("_finished", "_rejected", "_http", "_answer_cache", "_routed")
SUMS = ("_num_accepted", "_num_prompt", "_num_cached", "_num_generated", "_num_disconnected")


class ServerMetrics:
    """
    >>> metrics = ServerMetrics("tiny", max_model_len=128)
    >>> metrics.accepted(n=1, max_tokens=16, prompt_tokens=7)
    >>> metrics.first_token(0.05); metrics.tokens(1, None); metrics.tokens(1, 0.01)
    >>> metrics.summary()["tokens"]["generated"]
    2
    """

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        vllm_names: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name, self.vllm_names = model_name, vllm_names
        self._clock, self._began = clock, clock()
        lengths = length_edges(max_model_len)
        self._histograms = {
            metric.name: Histogram(metric.edges or lengths)
            for metric in METRICS
            if metric.kind == "histogram" and not metric.labels
        }
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._http_seconds: dict[tuple[str, ...], Histogram] = {}
        self._finished = LabelledCounts(*((reason,) for reason in FINISH_REASONS))
        self._rejected, self._http = LabelledCounts(), LabelledCounts()
        self._answer_cache, self._routed = LabelledCounts(), LabelledCounts()
        self._num_accepted = self._num_prompt = self._num_cached = self._num_generated = 0
        self._num_open = self._num_disconnected = self._num_restarts = 0
        self._engine_now: Mapping[str, float] = {}
        self._engine_totals = EngineTotals()
        self._experts = ExpertLoads(clock)
        self._rates, self._joined_rates = Rates(clock), Rates(clock)
        for rates in (self._rates, self._joined_rates):
            rates.read(0, 0)  # so that the first look has something to compare with

    # ------------------------------------------------------------ counting

    def accepted(self, *, n: int, max_tokens: int | None, prompt_tokens: int) -> None:
        """A request went to the engine."""
        self._num_accepted += 1
        self._num_prompt += prompt_tokens
        self._observe("request_params_n", n)
        self._observe("request_params_max_tokens", max_tokens)

    def first_token(self, ttft_s: float) -> None:
        """A stream's first event, `ttft_s` after its request arrived; call `tokens` for it too."""
        self._observe("time_to_first_token_seconds", ttft_s)

    def tokens(self, count: int, since_last_s: float | None) -> None:
        """One event of a stream; `since_last_s` is None for its first.

        Does not call `observe`, because it runs for every event."""
        self._num_generated += count
        if since_last_s is not None:
            itl = self._itl
            itl.counts[bisect_left(itl.edges, since_last_s)] += 1
            itl.total += since_last_s

    def finished(self, report: FinishReport) -> None:
        """A completion ended, well or not."""
        self._finished.add(report.reason)
        self._num_cached += report.cached_tokens
        self._observe("request_prompt_tokens", report.prompt_tokens)
        self._observe("request_generation_tokens", report.output_tokens)
        if report.is_background:
            return  # its times say nothing of those of requests that somebody waits for
        self._observe("e2e_request_latency_seconds", report.e2e_s)
        self._observe("request_queue_time_seconds", report.queue_s)
        self._observe("request_prefill_time_seconds", report.prefill_s)
        self._observe("request_decode_time_seconds", report.decode_s)
        if report.prefill_s is not None:
            inference_s = report.prefill_s + (report.decode_s or 0.0)
            self._observe("request_inference_time_seconds", inference_s)
        if report.decode_s is not None and report.output_tokens > 1:
            per_token = report.decode_s / (report.output_tokens - 1)
            self._observe("request_time_per_output_token_seconds", per_token)

    def rejected(self, reason: str) -> None:
        """A request was refused before the engine saw it: "queue_full", "bad_request" ..."""
        self._rejected.add(reason)

    def http(self, route: str, status: int, seconds: float) -> None:
        """An HTTP answer ended. `route` is the pattern that matched, never the client's path."""
        self._http.add(route, str(status))
        labels = (route,) if (route, str(status)) in self._http.counts else (OTHER,)
        histogram = self._http_seconds.get(labels)
        if histogram is None:
            histogram = self._http_seconds[labels] = Histogram(HTTP_EDGES)
        histogram.observe(seconds)

    def answer_cache(self, outcome: str) -> None:
        """A request asked the cache of answers: "exact", "draft", "proved", "answer", "miss"."""
        self._answer_cache.add(outcome)

    def routed(self, reason: str) -> None:
        """A request for "auto" came to this model: by "rule", "chance", "cascade" ..."""
        self._routed.add(reason)

    def disconnected(self) -> None:
        """A client left before its answer was done."""
        self._num_disconnected += 1

    def stream_opened(self) -> None:
        self._num_open += 1

    def stream_closed(self) -> None:
        self._num_open -= 1

    def engine(self, counts: Mapping[str, float], pid: int) -> None:
        """The engine's latest `SchedStats.as_dict()`; about once a second is enough."""
        self._engine_now = counts
        growth = self._engine_totals.update(counts, pid)
        if steps := int(growth.get("num_steps", 0)):
            mean = growth.get("num_fed_tokens", 0) / steps
            self._histograms[ENGINE_HISTOGRAM].observe(mean, steps)
        self._rates.read(self._num_generated, self._num_prompt)

    def experts(self, tokens: Mapping[int, Sequence[int]], pid: int) -> None:
        """Tokens the engine gave each expert so far, by layer; every few seconds is enough."""
        self._experts.update(tokens, pid)

    def engine_restarted(self) -> None:
        """The engine process is being started again: nothing runs or waits in it."""
        self._num_restarts += 1
        self._engine_now = {}

    # ------------------------------------------------------------ several processes

    def state(self) -> MetricsState:
        """What this process counted; `joined` adds up several."""
        return MetricsState(
            sums={name: getattr(self, name) for name in SUMS},
            histograms={name: HistogramState.of(h) for name, h in self._histograms.items()},
            labelled={name: labelled(getattr(self, name)) for name in LABELLED},
            http_seconds=[
                (list(labels), HistogramState.of(h)) for labels, h in self._http_seconds.items()
            ],
            engine_sums=self._engine_totals.sums,
            num_open=self._num_open,
            num_restarts=self._num_restarts,
        )

    def add(self, state: MetricsState, is_open: bool = True) -> None:
        """Count what another process counted too; `is_open`: it lives, and so do its streams."""
        for name, count in state.sums.items():
            setattr(self, name, getattr(self, name) + count)
        own_steps, steps = self._engine_totals["num_steps"], state.engine_sums.get("num_steps", 0)
        for name, histogram in state.histograms.items():
            if name not in self._histograms:
                continue
            if name == ENGINE_HISTOGRAM:  # all heard the same engine
                if steps <= own_steps:
                    continue
                self._histograms[name] = Histogram(self._histograms[name].edges)
            add_histogram(self._histograms[name], histogram)
        for name, states in state.labelled.items():
            add_labelled(getattr(self, name), states)
        for labels, histogram in state.http_seconds:
            mine = self._http_seconds.setdefault(tuple(labels), Histogram(HTTP_EDGES))
            add_histogram(mine, histogram)
        self._engine_totals.raise_to(state.engine_sums)
        self._num_open += state.num_open if is_open else 0
        self._num_restarts = max(self._num_restarts, state.num_restarts)

    def restore(self, state: MetricsState) -> None:
        """Go on from what a process before us counted; its streams are gone."""
        self.add(state, is_open=False)
        self._rates, self._joined_rates = Rates(self._clock), Rates(self._clock)
        for rates in (self._rates, self._joined_rates):
            rates.read(self._num_generated, self._num_prompt)

    def joined(self, others: Sequence[MetricsState]) -> ServerMetrics:
        """A reading of this process and others together; rates are those of whoever looks here."""
        made = ServerMetrics(self.model_name, 0, self.vllm_names, self._clock)
        made._histograms = {n: Histogram(h.edges) for n, h in self._histograms.items()}
        made._itl = made._histograms["inter_token_latency_seconds"]
        made._began, made._rates = self._began, self._joined_rates
        made._engine_now, made._experts = self._engine_now, self._experts
        for state in (self.state(), *others):
            made.add(state)
        return made

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    # ------------------------------------------------------------ reading

    def exposition(self) -> bytes:
        """Everything in the Prometheus text format."""
        prefixes = ("quire", "vllm") if self.vllm_names else ("quire",)
        return render(self._reading(), self.model_name, prefixes)

    def summary(self) -> dict[str, Any]:
        """The figures for people, as JSON; counted since start unless the name says otherwise."""
        now, totals = self._engine_now, self._engine_totals
        steps = totals["num_steps"]
        uptime = self._clock() - self._began
        recent, recent_prompt = self._rates.read(self._num_generated, self._num_prompt)
        queries = totals["prefix_query_tokens"]
        return {
            "model": self.model_name,
            "uptime_s": round(uptime, 3),
            "requests": {
                "accepted": self._num_accepted,
                "running": int(now.get("num_running", 0)),
                "waiting": int(now.get("num_waiting", 0)),
                "finished": {reason: n for (reason,), n in self._finished.counts.items()},
                "rejected": {reason: n for (reason,), n in self._rejected.counts.items()},
                "disconnected": self._num_disconnected,
                "preemptions": int(totals["num_preempted"]),
            },
            "tokens": {
                "prompt": self._num_prompt,
                "cached": self._num_cached,
                "generated": self._num_generated,
                "recomputed": int(totals["num_recomputed_tokens"]),
            },
            "average_latency_s": {
                short: _rounded(self._histograms[name].mean) for short, name in LATENCIES.items()
            },
            "tokens_per_s": {
                "recent": round(recent, 3),
                "recent_prompt": round(recent_prompt, 3),
                "average": round(self._num_generated / uptime, 3) if uptime > 0 else 0.0,
            },
            "average_batch_size": _ratio(totals["num_output_tokens"], steps),
            "average_step_tokens": _ratio(totals["num_fed_tokens"], steps),
            "prefix_hit_rate": _ratio(totals["prefix_hit_tokens"], queries),
            "kv_usage": now.get("kv_usage", 0.0),
            "open_streams": self._num_open,
            "engine": {"steps": int(steps), "restarts": self._num_restarts},
            "experts": self._experts.summary(),
            "answer_cache": {how: n for (how,), n in self._answer_cache.counts.items()},
            "routed": {why: n for (why,), n in self._routed.counts.items()},
        }

    def live(self) -> dict[str, Any]:
        """The page's part: rates of the last few seconds, histograms since start."""
        generated, prompt = self._rates.read(self._num_generated, self._num_prompt)
        return {
            "tokens_per_s": round(generated, 2),
            "prompt_tokens_per_s": round(prompt, 2),
            "open_streams": self._num_open,
            "ttft": _plain(self._histograms["time_to_first_token_seconds"]),
            "itl": _plain(self._itl),
            "experts": self._experts.summary(),
        }

    def _reading(self) -> dict[str, Reading]:
        """For every name of the table: its value, or a value for each label set."""
        now, totals = self._engine_now, self._engine_totals
        pages: dict[tuple[str, ...], float] = {
            (state,): now.get(f"pages_{state}", 0) for state in ("live", "cached", "empty")
        }
        version: dict[tuple[str, ...], float] = {(__version__,): 1}
        experts = self._experts.recent()
        return {
            **self._histograms,
            "num_requests_running": now.get("num_running", 0),
            "num_requests_waiting": now.get("num_waiting", 0),
            "kv_cache_usage_perc": now.get("kv_usage", 0),
            "prefix_cache_queries": totals["prefix_query_tokens"],
            "prefix_cache_hits": totals["prefix_hit_tokens"],
            "num_preemptions": totals["num_preempted"],
            "prompt_tokens": self._num_prompt,
            "generation_tokens": self._num_generated,
            "request_success": self._finished.counts,
            **of_drafts(now, totals),
            "tokens_recomputed": totals["num_recomputed_tokens"],
            "engine_steps": totals["num_steps"],
            "engine_restarts": self._num_restarts,
            "late_work": {(k,): totals[f"num_late_{k}s"] for k in ("compile", "capture")},
            "kv_pages": pages,
            "kv_token_bytes": now.get("kv_token_bytes", 0),
            "kv_slots": now.get("kv_slots", 0),
            "kv_pages_evicted": totals["pages_evicted"],
            "kv_pages_copied": totals["pages_copied"],
            **of_tiers(now, totals),
            "requests_accepted": self._num_accepted,
            "requests_rejected": self._rejected.counts,
            "answer_cache_requests": self._answer_cache.counts,
            "route_requests": self._routed.counts,
            "http_requests": self._http.counts,
            "http_request_seconds": self._http_seconds,
            "open_streams": self._num_open,
            "client_disconnects": self._num_disconnected,
            "expert_tokens": self._experts.series(),
            "expert_imbalance": {(str(n),): load.imbalance for n, load in experts.items()},
            "experts_idle": {(str(n),): float(load.num_idle) for n, load in experts.items()},
            **of_ranks(now, totals),
            "build_info": version,
        }


LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "inter_token": "inter_token_latency_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
}


def _plain(histogram: Histogram) -> dict[str, list[float] | list[int]]:
    return {"le": list(histogram.edges), "counts": list(histogram.counts)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0

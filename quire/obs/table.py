"""The table of metrics: every name, its kind, labels, buckets and meaning, in one place.

`metrics.py` collects the values, `exposition.py` writes them out and `metrics_doc.py` makes
docs/metrics.md; all three read this table. Metrics that vLLM has too carry its names, labels and
bucket edges, so that dashboards and autoscalers written for vLLM keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

FAMILY_LABELS = ("model_name", "engine")  # of every metric that vLLM has too

TTFT_EDGES = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_EDGES = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
# vLLM's first edge is 10 ms, where small models on a GPU have long finished.
FINE_TOKEN_EDGES = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, *TOKEN_EDGES)
REQUEST_EDGES = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINE_REQUEST_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, *REQUEST_EDGES)
HTTP_EDGES = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
STEP_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_EDGES = (1, 2, 5, 10, 20)
UNKNOWN_LEN = 131_072  # assumed until a model says how long its sequences may be


def length_edges(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the longest sequence there can be; 0 if that is not known.

    >>> length_edges(30)
    (1, 2, 5, 10, 20)
    """
    longest = max_model_len or UNKNOWN_LEN
    edges, power = [], 1
    while power <= longest:
        edges += [digit * power for digit in (1, 2, 5) if digit * power <= longest]
        power *= 10
    return tuple(edges)


@dataclass(frozen=True, slots=True)
class Metric:
    """One name without its prefix; Prometheus adds `_total` to counters."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    in_vllm: bool = False
    edges: Sequence[float] | None = None  # histograms; None: `length_edges` of the model
    vllm_edges: Sequence[float] | None = None  # where ours are finer

    @property
    def all_labels(self) -> tuple[str, ...]:
        return (*(FAMILY_LABELS if self.in_vllm else ()), *self.labels)

    @property
    def sample_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _shared(name: str, kind: Kind, help: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name, kind, help, labels, in_vllm=True)


def _seconds(name: str, help: str) -> Metric:
    return Metric(name, "histogram", help, (), True, FINE_REQUEST_EDGES, REQUEST_EDGES)


METRICS = (
    _shared("num_requests_running", "gauge", "Requests that have a row in the batch."),
    _shared("num_requests_waiting", "gauge", "Requests in the waiting line."),
    _shared("kv_cache_usage_perc", "gauge", "Share of pages live requests hold, 0 to 1."),
    _shared("prefix_cache_queries", "counter", "Tokens looked up in the prefix cache."),
    _shared("prefix_cache_hits", "counter", "Tokens found in the prefix cache."),
    _shared("num_preemptions", "counter", "Times a request lost its pages to another."),
    _shared("prompt_tokens", "counter", "Prompt tokens of accepted requests."),
    _shared("generation_tokens", "counter", "Tokens generated and handed to clients."),
    _shared("request_success", "counter", "Completions by how they ended.", ("finished_reason",)),
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From arrival to the first token.",
        in_vllm=True,
        edges=TTFT_EDGES,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Between two events of one stream; with drafts an event may have several tokens.",
        in_vllm=True,
        edges=FINE_TOKEN_EDGES,
        vllm_edges=TOKEN_EDGES,
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Decode time divided by the tokens after the first, once for each completion.",
        in_vllm=True,
        edges=FINE_TOKEN_EDGES,
        vllm_edges=TOKEN_EDGES,
    ),
    _seconds("e2e_request_latency_seconds", "From arrival to the last token."),
    _seconds("request_queue_time_seconds", "From arrival to the first step."),
    _seconds("request_prefill_time_seconds", "From the first step to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
    _seconds("request_inference_time_seconds", "From the first step to the last token."),
    _shared("request_prompt_tokens", "histogram", "Prompt tokens of a completion."),
    _shared("request_generation_tokens", "histogram", "Generated tokens of a completion."),
    Metric("request_params_n", "histogram", "The n asked for.", in_vllm=True, edges=N_EDGES),
    _shared("request_params_max_tokens", "histogram", "The max_tokens asked for."),
    Metric(
        "iteration_tokens_total",
        "histogram",
        "Tokens fed in a step. Sum and count are exact; steps between two reports of the engine"
        " count as equally large.",
        in_vllm=True,
        edges=STEP_EDGES,
    ),
    _shared("spec_decode_num_drafts", "counter", "Shares of steps that carried drafts."),
    _shared("spec_decode_num_draft_tokens", "counter", "Drafts that were verified."),
    _shared(
        "spec_decode_num_accepted_tokens",
        "counter",
        "Drafts that became output; each saved its request a step.",
    ),
    _shared(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "The same by how many tokens ahead they were, from 0.",
        ("position",),
    ),
    Metric(
        "spec_decode_draft_seconds",
        "counter",
        "Time of the host spent on making drafts; on a GPU a model's are launched in it.",
    ),
    Metric(
        "tokens_recomputed",
        "counter",
        "Tokens fed again after a preemption, or a step that was given up.",
    ),
    Metric("engine_steps", "counter", "Steps of the engine."),
    Metric("engine_restarts", "counter", "Times the engine process was started again."),
    Metric(
        "late_work",
        "counter",
        "Kernels compiled and CUDA graphs captured after the engine was ready, while the requests"
        " of a step waited. Always 0 on a CPU.",
        ("kind",),
    ),
    Metric("kv_pages", "gauge", "Pages by state: live, cached or empty.", ("state",)),
    Metric("kv_token_bytes", "gauge", "Bytes the cache keeps of one token, in all layers."),
    Metric("kv_slots", "gauge", "Tokens that the pages hold together, by layer group."),
    Metric("kv_pages_evicted", "counter", "Cached pages evicted for new content."),
    Metric("kv_pages_copied", "counter", "Shared pages copied before a write."),
    Metric(
        "kv_tier_loads",
        "counter",
        "Pages of prefixes loaded in place of computed, by where they were. Here and below a page"
        " is that of all layer groups.",
        ("tier",),
    ),
    Metric("kv_tier_loaded_bytes", "counter", "Bytes of these pages."),
    Metric("kv_tier_pulls", "counter", "Tickets of other engines that brought pages."),
    Metric(
        "kv_tier_pull_seconds",
        "counter",
        "Seconds of these, each from the question to pages that a step can load.",
    ),
    Metric("kv_tier_saves", "counter", "Pages copied out of the pool when they were published."),
    Metric("kv_tier_written_bytes", "counter", "Bytes of pages written to the disk."),
    Metric(
        "kv_tier_drops",
        "counter",
        "Pages that were not written: the disk was too slow, full or not writable.",
    ),
    Metric("kv_tier_bad_pages", "counter", "Pages that were not what was written; computed again."),
    Metric("kv_tier_bytes", "gauge", "Bytes of pages outside the pool.", ("tier",)),
    Metric("requests_accepted", "counter", "Requests handed to the engine."),
    Metric("requests_rejected", "counter", "Requests refused, by reason.", ("reason",)),
    Metric(
        "answer_cache_requests",
        "counter",
        "Requests that asked the cache of answers, by what came of it: exact, draft, proved, answer"
        " or miss.",
        ("outcome",),
    ),
    Metric(
        "route_requests",
        "counter",
        "Requests for the model auto that came to this one, by reason: rule, chance, cascade,"
        " default, budget, unavailable or escalated. An escalated one counts for both models.",
        ("reason",),
    ),
    Metric("http_requests", "counter", "HTTP answers.", ("route", "status")),
    Metric(
        "http_request_seconds",
        "histogram",
        "From the request's head to the answer's end.",
        ("route",),
        edges=HTTP_EDGES,
    ),
    Metric("open_streams", "gauge", "Streams being written now."),
    Metric("client_disconnects", "counter", "Clients that left before their answer was done."),
    Metric(
        "expert_tokens",
        "counter",
        "Tokens given to each expert, padding and first runs of captured steps included. Not"
        " exposed where layers times experts exceed 2,048.",
        ("layer", "expert"),
    ),
    Metric(
        "expert_imbalance",
        "gauge",
        "Tokens of a layer's busiest expert divided by those of an average one, over the last"
        " minute; 1 is even.",
        ("layer",),
    ),
    Metric(
        "experts_idle",
        "gauge",
        "Experts of a layer without a token in the last minute.",
        ("layer",),
    ),
    Metric("ranks", "gauge", "Processes that hold the model together; 0 until it is loaded."),
    Metric(
        "expert_rebalances",
        "counter",
        "Times ranks looked which experts were visited most (`--num-redundant-experts`).",
    ),
    Metric("experts_read", "counter", "Experts the first rank read then, to be a second home."),
    Metric("experts_copied", "gauge", "Experts with several homes, in the first stage's layers."),
    Metric(
        "rank_imbalance",
        "gauge",
        "Visits of the busiest rank divided by those of an average one, mean of the first stage's"
        " layers, when it was last looked: as they were (before), and as they would have been with"
        " the homes chosen then (after). Absent, as the three above, where experts have one home.",
        ("homes",),
    ),
    Metric("build_info", "gauge", "Always 1; the label says which version runs.", ("version",)),
)

"""Throughput and latency through the public `LLM`, all requests present from the start."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.bench.workload import Job, percentile, random_tokens
from quire.errors import EngineDead
from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Throughput:
    """Times in seconds. Time to first token includes waiting for a place in the batch."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tok_s: float
    total_tok_s: float
    ttft_p50: float
    ttft_p95: float

    def as_dict(self) -> dict[str, Any]:
        return _rounded(asdict(self))


@dataclass(frozen=True, slots=True)
class Latency:
    """One request alone: medians over the repeats, times in seconds."""

    prompt_tokens: int
    output_tokens: int
    ttft: float
    prefill_tok_s: float
    seconds_per_token: float
    decode_tok_s: float

    def as_dict(self) -> dict[str, Any]:
        return _rounded(asdict(self))


def _rounded(record: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()}


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly this many tokens, always the same."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def vocab_size(llm: LLM) -> int:
    return llm._engine.spec.vocab_size


def measure_throughput(llm: LLM, jobs: Sequence[Job]) -> Throughput:
    warm_up(llm)
    prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
    params = [greedy(job.num_output) for job in jobs]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    _check_ends(outputs)
    num_output = sum(len(o.outputs[0].token_ids) for o in outputs)
    num_prompt = sum(len(job.prompt) for job in jobs)
    ttfts = [o.metrics.ttft for o in outputs if o.metrics and o.metrics.ttft is not None]
    return Throughput(
        requests=len(jobs),
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        seconds=seconds,
        output_tok_s=num_output / seconds,
        total_tok_s=(num_prompt + num_output) / seconds,
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p95=percentile(ttfts, 0.95),
    )


def measure_latency(llm: LLM, num_prompt: int, num_output: int, repeats: int = 3) -> Latency:
    """Decode speed is (N - 1) / (T(N) - T(1)): the prompt's share taken out."""
    warm_up(llm)
    vocab, seeds = vocab_size(llm), itertools.count(1)

    def seconds(num_tokens: int) -> float:
        # A fresh prompt each time, so that no prefix cache can help.
        prompt = random_tokens(random.Random(next(seeds)), num_prompt, vocab)
        start = time.perf_counter()
        outputs = llm.generate({"prompt_token_ids": list(prompt)}, greedy(num_tokens), False)
        taken = time.perf_counter() - start
        _check_ends(outputs)
        return taken

    firsts, each = [], []
    for _ in range(repeats):
        first = seconds(1)
        firsts.append(first)
        each.append((seconds(num_output) - first) / max(1, num_output - 1))
    ttft, per_token = statistics.median(firsts), statistics.median(each)
    return Latency(num_prompt, num_output, ttft, num_prompt / ttft, per_token, 1 / per_token)


def _check_ends(outputs: Sequence[RequestOutput]) -> None:
    """A request that failed took less time than it should: no figure may come of it."""
    for output in outputs:
        if output.outputs[0].finish_reason == "error":
            raise EngineDead(f"request {output.request_id}: {output.outputs[0].stop_reason}")


def warm_up(llm: LLM) -> None:
    """Start threads, compile kernels and allocate buffers with a request that is not counted."""
    llm.generate({"prompt_token_ids": [0] * 8}, greedy(4), use_tqdm=False)
    llm.reset_prefix_cache()

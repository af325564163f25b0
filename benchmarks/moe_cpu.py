"""Mixture of experts on a CPU: the time of a decode step follows active parameters, not all.

Random weights, one request at a time, the whole engine in every step. First experts are added while
each token goes on visiting two: the time should stay, a ratio near 1 beside one of parameters that
grows. Then tokens visit more of the same experts: now the time should grow, with the parameters
that are active. One JSON line with both.

    python benchmarks/moe_cpu.py [--steps 60] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.config import EngineArgs
from quire.engine.build import Engine, build_engine
from quire.errors import CheckpointError
from quire.params import SamplingParams
from quire.request import Request

NUM_EXPERTS, TOP_K = (4, 8, 16, 32), 2
ALL_TOP_K = (1, 2, 4, 8)  # of the most experts
PROMPT_LEN = 16
CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


@dataclass(slots=True)
class ConfigOnly:
    """A checkpoint without tensors, for random weights."""

    config: Mapping[str, Any]
    files: Sequence[Path] = ()

    def names(self) -> Sequence[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise CheckpointError(f"no tensor {name!r}: this checkpoint is a config alone")

    def read(self, name: str) -> Tensor:
        raise CheckpointError(f"no tensor {name!r}: this checkpoint is a config alone")


def start(num_experts: int, top_k: int, num_steps: int, num_threads: int) -> Engine:
    """An engine with its one request past the prompt."""
    sizes = {"num_local_experts": num_experts, "num_experts_per_tok": top_k}
    args = EngineArgs(
        device="cpu",
        dtype="float32",
        load_format="dummy",
        num_threads=num_threads,
        kv_cache_memory=64 << 20,
        max_num_seqs=1,
    )
    engine = build_engine(args, ConfigOnly({**CONFIG, **sizes}))
    params = SamplingParams(temperature=1.0, max_tokens=num_steps + 1, ignore_eos=True)
    engine.core.add(Request.new(0, list(range(PROMPT_LEN)), params, seed=0))
    engine.core.step()
    return engine


def step_times(engines: Sequence[Engine]) -> list[float]:
    """Milliseconds of a step of each: the lower quartile, engines in turn, so that what else the
    machine does falls on all of them alike."""
    times: list[list[float]] = [[] for _ in engines]
    while engines[0].core.has_work:
        for engine, own in zip(engines, times, strict=True):
            begin = time.perf_counter()
            engine.core.step()
            own.append(1e3 * (time.perf_counter() - begin))
    return [statistics.quantiles(own, n=4)[0] for own in times]


def ratios(engines: Sequence[Engine]) -> dict[str, list[float]]:
    """Times and sizes, and what they are of the first engine's."""
    times, specs = step_times(engines), [engine.spec for engine in engines]

    def of_first(values: Sequence[float]) -> list[float]:
        return [round(value / values[0], 2) for value in values]

    return {
        "step_ms": [round(t, 3) for t in times],
        "time_ratio": of_first(times),
        "param_ratio": of_first([spec.num_params for spec in specs]),
        "active_param_ratio": of_first([spec.num_active_params for spec in specs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    more_experts = [start(num, TOP_K, args.steps, args.threads) for num in NUM_EXPERTS]
    at_constant_top_k = {"top_k": TOP_K, "experts": NUM_EXPERTS, **ratios(more_experts)}
    more_experts.clear()  # their memory
    num = NUM_EXPERTS[-1]
    more_visits = [start(num, top_k, args.steps, args.threads) for top_k in ALL_TOP_K]
    at_constant_experts = {"experts": num, "top_k": ALL_TOP_K, **ratios(more_visits)}
    record = {
        "benchmark": "moe_cpu",
        "threads": args.threads,
        "steps": args.steps,
        "at_constant_top_k": at_constant_top_k,
        "at_constant_experts": at_constant_experts,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()

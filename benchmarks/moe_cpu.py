"""Mixture of experts on a CPU: the time of a decode step as experts are added at constant top-k.

Random weights, one request at a time, the whole engine in every step. Each token visits two experts
however many there are, so time should follow the two and not the many: a ratio near 1 is the claim,
and the number of parameters beside it is what it is held against.

    python benchmarks/moe_cpu.py [--steps 60] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.config import EngineArgs
from quire.engine.build import Engine, build_engine
from quire.errors import CheckpointError
from quire.params import SamplingParams
from quire.request import Request

NUM_EXPERTS = (4, 8, 16, 32)
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
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True, slots=True)
class ConfigOnly:
    """A checkpoint without tensors, for random weights."""

    config: Mapping[str, Any]

    def names(self) -> Sequence[str]:
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        raise CheckpointError(f"no tensor {name!r}: this checkpoint is a config alone")

    def read(self, name: str) -> Tensor:
        raise CheckpointError(f"no tensor {name!r}: this checkpoint is a config alone")


def start(num_experts: int, num_steps: int, num_threads: int) -> Engine:
    """An engine with its one request past the prompt."""
    args = EngineArgs(
        device="cpu",
        dtype="float32",
        load_format="dummy",
        num_threads=num_threads,
        kv_cache_memory=64 << 20,
        max_num_seqs=1,
    )
    engine = build_engine(args, ConfigOnly({**CONFIG, "num_local_experts": num_experts}))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    engines = [start(num, args.steps, args.threads) for num in NUM_EXPERTS]
    times, specs = step_times(engines), [engine.spec for engine in engines]
    sizes, active = [s.num_params for s in specs], [s.num_active_params for s in specs]
    record = {
        "benchmark": "moe_cpu",
        "top_k": CONFIG["num_experts_per_tok"],
        "threads": args.threads,
        "steps": args.steps,
        "experts": NUM_EXPERTS,
        "step_ms": [round(t, 3) for t in times],
        "time_ratio": [round(t / times[0], 2) for t in times],
        "param_ratio": [round(n / sizes[0], 2) for n in sizes],
        "active_param_ratio": [round(n / active[0], 2) for n in active],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()

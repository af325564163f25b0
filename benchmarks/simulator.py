"""The simulator against the engine it simulates: the same load on both, figures side by side.

Measures the engine's costs first, then drives its loop with requests that arrive while it works,
and simulates the same requests. Prints a table and a JSON line with the ratio of each prediction to
what was measured. Run from the repository root.

    python -m benchmarks.simulator                        the default model
    python -m benchmarks.simulator --model FOLDER --rates 1,4 --requests 40 --threads 2
    python -m benchmarks.simulator --threads 1 --cpu-clock      on a machine that others use too
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from quire import LLM
from quire.bench.offline import greedy
from quire.bench.serve.client import Outcome
from quire.bench.serve.figures import figures
from quire.bench.serve.work import Ask, Lengths, asks, drawn_sizes, poisson_times
from quire.bench.step_costs import measure_costs
from quire.bench.workload import Span
from quire.cli.show import print_table
from quire.engine.build import Engine
from quire.request import Request
from quire.sim.engine import SimEngine
from quire.sim.simulate import simulate

COMPARED = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("gap_ms", "p50"), ("gap_ms", "p99"))


class Timeline:
    """The engine's time, in which nobody waits idly for the next request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._begun, self._skipped = clock, clock(), 0.0

    @property
    def now(self) -> float:
        return self._clock() - self._begun + self._skipped

    def skip_to(self, then: float) -> None:
        self._skipped += max(0.0, then - self.now)


def measure(
    engine: Engine, work: Sequence[Ask], vocab_size: int, clock: Callable[[], float]
) -> list[Outcome]:
    """Requests that arrive when they are meant to, on the engine's own loop."""
    core, outcomes = engine.core, [Outcome(ask.at) for ask in work]
    words: dict[str, int] = {}
    due = list(range(len(work)))[::-1]
    time_line = Timeline(clock)
    while due or core.has_work:
        while due and work[due[-1]].at <= time_line.now:
            index = due.pop()
            ids = [
                words.setdefault(word, 3 + len(words)) % vocab_size
                for word in work[index].prompt.split(" ")
            ]
            outcomes[index].num_prompt = len(ids)
            params = greedy(work[index].num_output)
            core.add(Request.new(index, ids, params, arrival=work[index].at))
        if not core.has_work:
            time_line.skip_to(work[due[-1]].at)
            continue
        for event in core.step():
            outcome, now = outcomes[event.request_id], time_line.now
            if event.tokens:
                outcome.token_times.append(now)
                outcome.num_output += len(event.tokens)
            if event.finish is not None:
                outcome.ended = now
    return outcomes


def compare(real: dict[str, Any], said: dict[str, Any]) -> dict[str, dict[str, float]]:
    found = {}
    for name, share in COMPARED:
        found[f"{name.removesuffix('_ms')} {share}"] = {
            "measured": real[name][share],
            "predicted": said[name][share],
        }
    key = "output_tokens_per_s"
    found["tokens/s"] = {"measured": real[key], "predicted": said[key]}
    for line in found.values():
        line["ratio"] = round(line["predicted"] / max(line["measured"], 1e-9), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--rates", default="1,4")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-len", default="32-192")
    parser.add_argument("--output-len", default="16-48")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-clock", action="store_true", help="of this process alone: 1 thread")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        device="cpu",
        max_num_seqs=16,
        max_model_len=1024,
        num_threads=args.threads,
        tensor_parallel_size=args.tensor_parallel_size,
        skip_tokenizer_init=True,
    )
    engine = llm._engine
    clock = time.process_time if args.cpu_clock else time.perf_counter
    table = measure_costs(engine, args.model, clock=clock)
    lengths = Lengths(Span.parse(args.prompt_len), Span.parse(args.output_len))
    results: dict[str, Any] = {}
    for rate in map(float, args.rates.split(",")):
        times = poisson_times(args.requests, rate, 1, seed=1)
        work = asks(times, drawn_sizes(args.requests, lengths, seed=1), seed=1)
        llm.reset_prefix_cache()
        real = figures(measure(engine, work, engine.spec.vocab_size, clock), None)
        said = figures(simulate(SimEngine.of(table), work).outcomes, None)
        results[str(rate)] = lines = compare(real, said)
        rows = [(name, *line.values()) for name, line in lines.items()]
        print_table((f"rate {rate:g}", "measured", "predicted", "ratio"), rows)
    print(json.dumps({"what": "simulator", "fit_error": round(table.fit_error, 4), **results}))


if __name__ == "__main__":
    main()

"""Steps in which prompts meet decodes, with and without CUDA graphs of them, random weights.

    python -m benchmarks.gpu_mixed_steps 8b
    python -m benchmarks.gpu_mixed_steps 0.6b --running 64

While some requests decode, a new one of 60-400 tokens arrives before every second step and leaves
with its sixth token. The two ways take turns in one engine, the first round of each unseen; prompts
are never the same, so no cache helps. Prints one JSON line: milliseconds from step to step as the
host sees them, which is what lies between a request's tokens. `--rehearse` takes a tiny model, for
any machine; the ways do not differ there.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.shapes import SHAPES, shrunk
from quire.bench.workload import percentile, random_tokens
from quire.request import Request


class Traffic:
    def __init__(self, llm: LLM, running: int, num_steps: int) -> None:
        self.core, self.vocab = llm._engine.core, llm._engine.spec.vocab_size
        self.running, self.num_steps = running, num_steps
        self.random, self.ids = random.Random(0), count(1)

    def request(self, num_prompt: int, num_output: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        prompt = random_tokens(self.random, num_prompt, self.vocab)
        return Request.new(next(self.ids), prompt, params, arrival=time.monotonic())

    def gaps(self) -> Iterator[float]:
        """Seconds of each step."""
        for _ in range(self.running):
            self.core.add(self.request(128, self.num_steps + 100))
        while self.core.scheduler.stats().num_waiting:
            self.core.step()
        for _ in range(4):  # the device is behind by the prompts just fed
            self.core.step()
        arrivals = [self.request(self.random.randint(60, 400), 6) for _ in range(self.num_steps)]
        last = time.perf_counter()
        for step, arrival in enumerate(arrivals):
            if step % 2 == 0:
                self.core.add(arrival)
            self.core.step()
            last, before = time.perf_counter(), last
            yield last - before
        for request_id in list(self.core.scheduler.running):
            self.core.abort(request_id)
        while self.core.has_work:
            self.core.step()


def summary(gaps: list[float]) -> dict[str, float]:
    mean = sum(gaps) / len(gaps)
    return {"mean_ms": round(1e3 * mean, 2), "p95_ms": round(1e3 * percentile(gaps, 0.95), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    config = shrunk(SHAPES[args.shape]) if args.rehearse else dict(SHAPES[args.shape])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, seed=0)
    traffic, runner = Traffic(llm, args.running, args.steps), llm._engine.runner
    graphs = runner.mixed_graphs
    found: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(3):
        for way, gaps in found.items():
            runner.mixed_graphs = graphs if way == "with" else None
            seen = list(traffic.gaps())
            gaps.extend(seen if turn else [])
    ways = {way: summary(gaps) for way, gaps in found.items()}
    ratio = ways["without"]["mean_ms"] / ways["with"]["mean_ms"]
    record = {"shape": args.shape, "running": args.running, "steps": args.steps, **ways}
    print(json.dumps({**record, "ratio": round(ratio, 2)}))


if __name__ == "__main__":
    main()

"""The process that measures one shape: builds its engine once and prints a line of JSON per row.

Timing is wall clock around `LLM.generate`. A decode step is (time of N tokens - time of 1) /
(N - 1), of medians. Prompts are fresh random tokens every time, so a prefix cache cannot help
except where the row is about it or says so. The process ends with its shape, which frees the
device's memory whatever happened; `h200.py` is the parent that reads the lines.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.bench.suite import OWN_TOKENS, Row, request_lengths
from quire.errors import EngineDead

if TYPE_CHECKING:
    from quire.llm import LLM

Record = dict[str, Any]
Ids = list[int]


class Timed(NamedTuple):
    seconds: float
    num_output: int

    @property
    def tok_s(self) -> float:
        return self.num_output / self.seconds


class Workbench:
    """Random prompts into one engine, with a clock around it."""

    def __init__(self, llm: LLM, vocab_size: int, seed: int = 0) -> None:
        self.llm, self.vocab_size = llm, vocab_size
        self.rng = random.Random(seed)

    def tokens(self, count: int) -> Ids:
        return [self.rng.randrange(100, self.vocab_size - 100) for _ in range(count)]

    def time(self, prompts: Sequence[Ids], outputs: Sequence[int], temperature: float) -> Timed:
        from quire.params import SamplingParams

        params = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outputs
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        answers = self.llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_output = sum(len(answer.outputs[0].token_ids) for answer in answers)
        if num_output != sum(outputs):
            raise EngineDead(f"got {num_output} tokens of {sum(outputs)} asked for")
        return Timed(seconds, num_output)

    def prompts(self, row: Row) -> list[Ids]:
        return [self.tokens(row.prompt) for _ in range(row.requests)]

    def same(self, row: Row, num_output: int, prompts: Sequence[Ids] | None = None) -> float:
        """Seconds for the row's requests, all of one length, with new prompts unless given."""
        asked = self.prompts(row) if prompts is None else prompts
        return self.time(asked, [num_output] * row.requests, 0.0).seconds

    def warm_up(self, num_requests: int) -> None:
        """Compile kernels and capture graphs."""
        self.time([self.tokens(32)], [1], 0.0)
        self.time([self.tokens(64) for _ in range(num_requests)], [8] * num_requests, 0.0)


def measure(bench: Workbench, row: Row) -> Record:
    if row.kind == "decode":
        return _decode(bench, row)
    if row.kind == "prefill":
        return _prefill(bench, row)
    runs = [_throughput(bench, row, run) for run in range(row.repeats)]
    return {"value": max(run.tok_s for run in runs), "runs": [run._asdict() for run in runs]}


def _decode(bench: Workbench, row: Row) -> Record:
    prompts = bench.prompts(row) if row.is_cached else None
    bench.same(row, 4, prompts)
    ones = [bench.same(row, 1, prompts) for _ in range(row.repeats)]
    fulls = [bench.same(row, row.output, prompts) for _ in range(row.repeats)]
    full = statistics.median(fulls)
    step = (full - statistics.median(ones)) / (row.output - 1)
    return {
        "value": step * 1e3,
        "tok_s": row.requests / step,
        "e2e_tok_s": row.requests * row.output / full,
        "runs": {"one_s": ones, "all_s": fulls},
    }


def _prefill(bench: Workbench, row: Row) -> Record:
    times = [bench.same(row, 1) for _ in range(row.repeats + 2)][2:]
    middle = statistics.median(times)
    return {"value": middle * 1e3, "tok_s": row.prompt / middle, "runs": times}


def _throughput(bench: Workbench, row: Row, run: int) -> Timed:
    if row.kind == "prefix":
        shared = bench.tokens(row.prompt)
        bench.time([shared + bench.tokens(8)], [1], 0.0)
        prompts = [shared + bench.tokens(OWN_TOKENS) for _ in range(row.requests)]
        return bench.time(prompts, [row.output] * row.requests, 0.0)
    lengths = request_lengths(row, run)
    prompts = [bench.tokens(num_prompt) for num_prompt, _ in lengths]
    temperature = 0.6 if row.kind == "nano" else 0.0
    return bench.time(prompts, [num_output for _, num_output in lengths], temperature)


def main(task: Record) -> None:
    """`task` has model, engine options, num_warm, rows as dictionaries, and the seconds left."""
    begin = time.perf_counter()
    from quire.bench.machine import machine_rates
    from quire.bench.offline import vocab_size
    from quire.llm import LLM

    llm = LLM(task["model"], **task["options"])
    bench = Workbench(llm, vocab_size(llm))
    bench.warm_up(task["num_warm"])
    ready = {"engine": _described(llm), "ready_s": time.perf_counter() - begin}
    pages = llm._engine.runner.pool.data
    before = machine_rates(pages)._asdict()
    _say({**ready, "machine": {"before": before}})
    for fields in task["rows"]:
        row = Row(**fields)
        left = task["seconds"] - (time.perf_counter() - begin)
        if left < row.need_s:
            _say({"row": row.name, "skipped": f"{left:.0f} s left, may need {row.need_s:.0f}"})
            continue
        start = time.perf_counter()
        record = measure(bench, row)
        _say({"row": row.name, **record, "took_s": time.perf_counter() - start})
    _say({**ready, "machine": {"before": before, "after": machine_rates(pages)._asdict()}})


def _described(llm: LLM) -> Record:
    import torch

    device = llm._engine.config.device
    name = torch.cuda.get_device_name() if device == "cuda" else device
    decisions = {decision.what: decision.value for decision in llm.decisions}
    return {**decisions, "device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def _say(record: Record) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    os._exit(0)  # every line was flushed; freeing a model piece by piece takes seconds

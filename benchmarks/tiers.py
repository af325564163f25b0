"""Pages beyond the pool: what they save, and what keeping them costs.

    python -m benchmarks.tiers first        first token behind a long prefix, by where its pages are
    python -m benchmarks.tiers preempted    tokens computed again in a pool that is too small
    python -m benchmarks.tiers predicted    the same, simulated from what steps take here
    python -m benchmarks.tiers through      tokens a second while every page is also written out
    python -m benchmarks.tiers apart        gaps between tokens beside prompts: one engine, or two

Each prints one JSON line. Times are the best of rounds that take turns; `apart` shows all gaps. Run
from the repository root.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from quire import LLM, SamplingParams
from quire.bench.serve.work import Ask
from quire.bench.step_costs import measure_costs
from quire.sim.engine import SimEngine
from quire.sim.outside import Places
from quire.sim.simulate import simulate
from tests.e2e.harness import Served, free_port, wait_until
from tests.e2e.raw import request_bytes

FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 20_000) for _ in range(count)]


def open_llm(options: argparse.Namespace, **changes: Any) -> LLM:
    return LLM(options.model, device="cpu", num_threads=options.threads, **changes)


@contextmanager
def opened(options: argparse.Namespace, **changes: Any) -> Iterator[LLM]:
    llm = open_llm(options, **changes)
    yield llm
    if llm._engine.tiers is not None:
        llm._engine.tiers.close()


def seconds(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> float:
    begun = time.perf_counter()
    llm.generate(list(prompts), params, use_tqdm=False)
    return time.perf_counter() - begun


# ------------------------------------------------------------ one engine


def first(options: argparse.Namespace) -> dict[str, object]:
    """A prompt of `--length` tokens: computed, in the pool, in memory, on disk after a restart."""
    places: dict[str, list[float]] = {"computed": [], "pool": [], "memory": [], "disk": []}
    size = {"max_model_len": options.length + 64}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"kv_disk": folder, "kv_disk_size": 8 << 30, "kv_host_memory": 4 << 30, **size}
        for turn in range(options.rounds):
            prompt = [tokens(turn, options.length)]
            with opened(options, **disk) as llm:
                seconds(llm, [tokens(-1 - turn, 64)], FIRST)
                places["computed"].append(seconds(llm, prompt, FIRST))
                places["pool"].append(seconds(llm, prompt, FIRST))
                llm.reset_prefix_cache()
                places["memory"].append(seconds(llm, prompt, FIRST))
            with opened(options, **disk) as llm:
                seconds(llm, [tokens(-100 - turn, 64)], FIRST)
                places["disk"].append(seconds(llm, prompt, FIRST))
    best = {place: min(times) for place, times in places.items()}
    return {
        "length": options.length,
        "ms": {place: round(1e3 * best[place], 1) for place in best},
        "of computed": {place: round(best[place] / best["computed"], 3) for place in best},
    }


def preempted(options: argparse.Namespace) -> dict[str, object]:
    """Requests that together need three times the pool."""
    num, length, out = 16, options.length, 192
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
    prompts = [tokens(seed, length) for seed in range(num)]
    found: dict[str, object] = {"requests": num, "prompt": length, "answer": out}
    answers = []
    for name, more in {"pool alone": {}, "memory": {"kv_host_memory": 4 << 30}}.items():
        args = {"max_model_len": length + out + 16, "max_num_seqs": num}
        with opened(options, kv_cache_memory=options.pool << 20, **args, **more) as llm:
            begun = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.stats()
            answers.append([output.outputs[0].token_ids for output in outputs])
            found[name] = {
                "preemptions": stats.num_preempted,
                "tokens computed again": stats.num_recomputed_tokens,
                "seconds": round(time.perf_counter() - begun, 2),
            }
    found["same tokens"] = answers[0] == answers[1]
    return found


def predicted(options: argparse.Namespace) -> dict[str, object]:
    """`preempted`, simulated."""
    num, length, out = 16, options.length, 192
    args = {"max_model_len": length + out + 16, "max_num_seqs": num}
    with opened(options, kv_cache_memory=options.pool << 20, **args) as llm:
        table = measure_costs(llm._engine, options.model, clock=time.process_time)
    work = [
        Ask(0.0, " ".join(f"{seed}.{i}" for i in range(length)), length, out) for seed in range(num)
    ]
    found: dict[str, object] = {"requests": num, "prompt": length, "answer": out}
    for name, places in {"pool alone": Places(), "memory": Places(memory=4 << 30)}.items():
        done = simulate(replace(SimEngine.of(table), places=places), work)
        found[name] = {
            "preemptions": done.stats.num_preempted,
            "tokens computed again": done.stats.num_recomputed_tokens,
            "seconds": round(done.seconds, 2),
        }
    return found


def through(options: argparse.Namespace) -> dict[str, object]:
    """The same fresh prompts and answers with and without tiers, in turns; "none again" tells how
    much of a difference is the machine's."""
    num, out = 8, 128
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        memory = {"kv_host_memory": options.memory << 20}
        kinds: dict[str, dict[str, Any]] = {
            "none": {},
            "none again": {},
            "memory": memory,
            "memory and disk": {**memory, "kv_disk": folder, "kv_disk_size": 8 << 30},
        }
        size = {"max_model_len": options.length + out + 16}
        size["kv_cache_memory"] = options.pool << 20
        llms = {
            name: stack.enter_context(opened(options, **size, **more))
            for name, more in kinds.items()
        }
        runs: dict[str, list[Spent]] = {name: [] for name in kinds}
        for turn in range(options.rounds + 1):
            prompts = [tokens(1_000 * turn + i, options.length) for i in range(num)]
            for name in random.Random(turn).sample(sorted(llms), len(llms)):
                found = spent(llms[name], prompts, params)
                if turn:  # the first round warms up
                    runs[name].append(found)
    each = num * (options.length + out)
    return {
        "tokens a second": {name: round(each / min(found).wall, 1) for name, found in runs.items()},
        "of none, median": {name: against(runs, name, "wall") for name in runs},
        "CPU time of all threads, of none": {name: against(runs, name, "cpu") for name in runs},
        "CPU time of the thread that steps, of none": {
            name: against(runs, name, "steps") for name in runs
        },
    }


class Spent(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float  # of all threads, until all is written
    steps: float  # of this thread


def spent(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams) -> Spent:
    cpu, own = time.process_time(), time.thread_time()
    wall, own = seconds(llm, prompts, params), time.thread_time() - own
    tiers = llm._engine.tiers
    assert tiers is None or tiers.flush(60.0)
    return Spent(wall, time.process_time() - cpu, own)


def against(runs: dict[str, list[Spent]], name: str, what: str) -> float:
    """Median of what this kind took, as a share of what "none" took in the same round."""
    pairs = zip(runs[name], runs["none"], strict=True)
    return round(statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs), 4)


# ------------------------------------------------------------ two engines


async def gaps_of(port: int, body: dict[str, Any]) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/v1/completions", body, headers={"Connection": "close"}))
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return [later - sooner for sooner, later in itertools.pairwise(times[1:])]


async def beside_prompts(port: int, length: int, duration: float) -> list[float]:
    """Gaps of four streams while prompts of `length` tokens keep coming."""
    deadline = time.perf_counter() + duration
    plain = {"temperature": 0.0, "ignore_eos": True, "stream": True}

    async def stream(seed: int) -> list[float]:
        found: list[float] = []
        while time.perf_counter() < deadline:
            seed += 100
            body = {"prompt": tokens(seed, 32), "max_tokens": 64, **plain}
            found += await gaps_of(port, body)
        return found

    async def prompts(seed: int) -> list[float]:
        while time.perf_counter() < deadline:
            seed += 100
            await gaps_of(port, {"prompt": tokens(seed, length), "max_tokens": 2, **plain})
            await asyncio.sleep(0.5)
        return []

    gaps = await asyncio.gather(*(stream(i) for i in range(4)), prompts(1), prompts(2))
    return sorted(gap for found in gaps for gap in found)


@contextmanager
def routed(port: int, prefill: str, decode: str) -> Iterator[None]:
    """A router in front of both, once it knows them."""
    words = ["router", "--port", str(port), "--prefill", prefill, "--upstream", decode]
    process = subprocess.Popen([sys.executable, "-m", "quire", *words])
    try:
        wait_until(lambda: _all_up(f"http://127.0.0.1:{port}/router/upstreams"), 30, "router")
        yield
    finally:
        process.terminate()
        process.wait()


def _all_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return all(one["state"] == "up" for one in json.load(answer)["data"])
    except OSError:
        return False


def apart(options: argparse.Namespace) -> dict[str, object]:
    """One engine of two threads, and one of one thread each to prefill and to decode."""
    model, size = Path(options.model), ("--max-model-len", str(options.length + 128))
    found = {}
    with Served(model, "--threads", "2", *size) as served:
        found["together"] = asyncio.run(beside_prompts(served.port, options.length, 20))
    link = f"127.0.0.1:{free_port()}"
    lends = ("--role", "prefill", "--threads", "1", "--kv-listen", link)
    pulls = ("--role", "decode", "--threads", "1", "--kv-peers", link)
    with Served(model, *lends, *size) as one, Served(model, *pulls, *size) as two:
        port = free_port()
        with routed(port, one.url, two.url):
            found["apart"] = asyncio.run(beside_prompts(port, options.length, 20))
    return {
        name: {
            "gaps": len(gaps),
            **{f"p{q}_ms": round(1e3 * gaps[len(gaps) * q // 100], 1) for q in (50, 90, 99)},
        }
        for name, gaps in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    whats = {f.__name__: f for f in (first, preempted, predicted, through, apart)}
    parser.add_argument("what", choices=whats)
    parser.add_argument("--model", default="default")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--pool", type=int, default=48, help="MiB of the pool, in two of them")
    parser.add_argument("--memory", type=int, default=4096, help="MiB of memory in `through`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    print(json.dumps({"what": options.what, **whats[options.what](options)}))


if __name__ == "__main__":
    main()

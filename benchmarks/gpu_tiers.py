"""Pages beyond a GPU's pool: what keeping them costs, and what they save. Random weights.

    python -m benchmarks.gpu_tiers 8b
    python -m benchmarks.gpu_tiers 8b --only through,host

    through   tokens a second of requests that decode: nothing kept elsewhere, every page saved too
    host      first token behind a prompt: computed, and with its pages in memory of the host
    disk      the same behind a long one: computed, and after a restart with its pages on a disk,
              whose files have been dropped from the system's cache
    apart     the same with its pages in an engine of another process on this GPU, by transport;
              `proper` is from the question for pages to pages that a step can load

Prints a JSON line for each; times are in milliseconds, the best of `--rounds`. `parts` says where
the time of one more, timed request went: calls that take turns with nothing between them may hold
each other. A long prompt is computed three times: first, again with other tokens, and with the disk
at rest. `late` are kernels that were compiled when a request already waited, `where` what the
thread that steps was seen at, in seconds.
`--rehearse` takes a tiny model, on any machine. Run from the repository root.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.tiers_watch import Parts, Sampler, drop_from_cache, listen, page_rates, read_rates
from quire import LLM, SamplingParams
from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.bench.workload import random_tokens
from quire.engine.build import Engine
from quire.engine.lending import ticket_for
from quire.request import Request
from quire.step import TokenEvent

GIB = 1 << 30
IDS = count(1)


class Sizes(NamedTuple):
    running: int  # requests in `through`
    output: int  # of each
    near: int  # tokens of a prompt
    far: int  # of a long one
    pool: int  # bytes
    memory: int
    disk: int
    rounds: int


class Bench:
    def __init__(self, folder: str, sizes: Sizes, scratch: Path) -> None:
        self.folder, self.sizes, self.scratch = folder, sizes, scratch

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[Engine]:
        llm = LLM(self.folder, **options(self.sizes), **changes)
        engine = llm._engine
        first_token(engine, prompt_of(engine, 64, seed=-1))
        yield engine
        if engine.tiers is not None:
            engine.tiers.close(60.0)
        del llm, engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # ------------------------------------------------------------ one engine

    def through(self) -> dict[str, object]:
        rates: dict[str, list[float]] = {"none": [], "memory": []}
        with self.opened() as none, self.opened(kv_host_memory=self.sizes.memory) as memory:
            for turn in range(self.sizes.rounds + 1):
                for name, engine in (("none", none), ("memory", memory)):
                    rate = self._decode_rate(engine, turn)
                    rates[name] += [rate] if turn else []  # the first round captures graphs
            counts = memory.tiers.counts if memory.tiers is not None else None
            assert counts is not None and counts.saves, "nothing was saved"
            best = {name: round(max(found), 1) for name, found in rates.items()}
            ratio = round(best["memory"] / best["none"], 4)
            return {"tok_s": best, "of none": ratio, "saves": counts.saves, "drops": counts.drops}

    def _decode_rate(self, engine: Engine, turn: int) -> float:
        wish = SamplingParams(temperature=0.0, max_tokens=self.sizes.output, ignore_eos=True)
        for i in range(self.sizes.running):
            prompt = prompt_of(engine, 64, seed=1000 * turn + i)
            engine.core.add(Request.new(next(IDS), prompt, wish, arrival=time.monotonic()))
        begun = time.perf_counter()
        while engine.core.has_work:
            engine.core.step()
        return self.sizes.running * self.sizes.output / (time.perf_counter() - begun)

    def host(self) -> dict[str, object]:
        times: dict[str, list[float]] = {"computed": [], "memory": []}
        with self.opened(kv_host_memory=self.sizes.memory) as engine:
            assert engine.tiers is not None
            for turn in range(self.sizes.rounds + 1):
                prompt = prompt_of(engine, self.sizes.near, seed=50 + turn)
                for name in times:
                    taken = first_token(engine, prompt)
                    times[name] += [taken] if turn else []
                    engine.core.scheduler.kv.flush()
                    time.sleep(0.3)  # copies that still run are another question
            found = {"tokens": self.sizes.near, **best_ms(times), **facts(engine)}
            lifted, parts = engine.tiers.counts.lift_seconds, Parts(engine)
            found["timed_ms"] = round(1e3 * first_token(engine, prompt), 1)
            found["pages_gb_s"] = page_rates(engine, self.sizes.near)
            found["lift_ms"] = round(1e3 * (engine.tiers.counts.lift_seconds - lifted), 1)
            return {**found, "parts": parts.ms()}

    def disk(self) -> dict[str, object]:
        folder = self.scratch / "kv"
        disk = {
            "kv_disk": str(folder),
            "kv_disk_size": self.sizes.disk,
            "kv_host_memory": self.sizes.memory,
        }
        found: dict[str, object] = {"tokens": self.sizes.far}
        with self.opened(**disk) as engine:
            prompt = prompt_of(engine, self.sizes.far, seed=9)
            first_token(engine, prompt_of(engine, self.sizes.near, seed=10))  # compiles, captures
            engine.core.scheduler.kv.flush()
            tiers = engine.tiers
            assert tiers is not None and tiers.disk is not None and tiers.flush(120.0)
            found["first"] = watched(engine, prompt)
            begun = time.perf_counter()
            assert tiers.flush(120.0)
            found["written_after_s"] = round(time.perf_counter() - begun, 1)
            tiers.disk._resume = time.monotonic() + 1e6  # as after an error: nothing is written
            found["at_rest"] = watched(engine, prompt_of(engine, self.sizes.far, seed=11))
            tiers.disk._resume = 0.0
            found["again"] = watched(engine, prompt_of(engine, self.sizes.far, seed=12))
            found["drops"] = tiers.counts.drops
            tiers._unwritten.clear()  # of the last one: nobody will read it
        drop_from_cache(folder)
        with self.opened(**disk) as engine:
            found["from_disk"] = watched(engine, prompt)
            found |= facts(engine)
        found["reads_gb_s"] = read_rates(folder)
        return found

    # ------------------------------------------------------------ two engines

    def apart(self) -> dict[str, object]:
        found: dict[str, object] = {"tokens": self.sizes.near}
        transports = ("ipc", "sockets") if torch.cuda.is_available() else ("sockets",)
        for transport in transports:
            common = {"kv_secret": str(self.scratch / "secret"), "kv_transport": transport}
            with lending(self.folder, self.sizes, common) as lender:
                peers = (lender.word("ready"),)
                with self.opened(kv_role="decode", kv_peers=peers, **common) as engine:
                    found[transport] = self._handed_over(engine, lender)
        return found

    def _handed_over(self, engine: Engine, lender: Lender) -> dict[str, object]:
        names = ("computed", "handed_over", "proper")
        times: dict[str, list[float]] = {name: [] for name in names}
        assert engine.tiers is not None
        counts = engine.tiers.counts
        for turn in range(self.sizes.rounds + 1):
            prompt = prompt_of(engine, self.sizes.near, seed=70 + turn)
            ticket, before = lender.ticket(list(prompt)), counts.pull_seconds
            taken = first_token(engine, prompt, ticket)
            engine.core.scheduler.kv.flush()
            computed = first_token(engine, prompt)
            engine.core.scheduler.kv.flush()
            if turn:
                some = (computed, taken, counts.pull_seconds - before)
                times = {name: [*times[name], one] for name, one in zip(names, some, strict=True)}
        ticket = lender.ticket(list(prompt))
        parts = Parts(engine)
        taken = first_token(engine, prompt, ticket)
        failed = {"failed_pulls": counts.failed_pulls, "timed_ms": round(1e3 * taken, 1)}
        return {**best_ms(times), **failed, **facts(engine), "parts": parts.ms()}


class Lender:
    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child

    def word(self, name: str) -> str:
        assert self.child.stdout is not None
        while line := self.child.stdout.readline():
            if line.startswith(name + " "):
                return line.split()[1]
        raise RuntimeError("the engine that lends has ended")

    def ticket(self, prompt: list[int]) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(prompt) + "\n")
        self.child.stdin.flush()
        return self.word("ticket")


@contextmanager
def lending(folder: str, sizes: Sizes, common: dict[str, str]) -> Iterator[Lender]:
    words = [sys.executable, "-m", "benchmarks.gpu_tiers", "--lend"]
    words.append(json.dumps({"folder": folder, "sizes": sizes, **common}))
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Lender(child)
    finally:
        child.kill()
        child.wait()


def lend(asked: dict[str, Any]) -> None:
    """An engine that prefills until it is killed: a prompt on stdin, a ticket on stdout."""
    folder, sizes = asked.pop("folder"), Sizes(*asked.pop("sizes"))
    lends = {"kv_role": "prefill", "kv_listen": "127.0.0.1:0", **asked}
    engine = LLM(folder, **options(sizes), kv_host_memory=sizes.memory // 4, **lends)._engine
    first_token(engine, prompt_of(engine, 64, seed=-1))
    said = next(one.value for one in engine.decisions if one.what == "kv role")
    print("ready", str(said).split()[-1], flush=True)
    wish = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for line in sys.stdin:
        request = Request.new(next(IDS), json.loads(line), wish, arrival=time.monotonic())
        request.kv_lease = True
        engine.core.add(request)
        events: list[TokenEvent] = []
        while engine.core.has_work:
            events += engine.core.step()
        print("ticket", ticket_for(request, events[-1], engine), flush=True)


# ------------------------------------------------------------ where time goes


def watched(engine: Engine, prompt: tuple[int, ...]) -> dict[str, object]:
    """First token behind a prompt, and what took how long."""
    late, steps = list[str](), list[float]()
    if torch.cuda.is_available():
        listen(late)
    assert engine.tiers is not None
    before, sampler = replace(engine.tiers.counts), Sampler(threading.get_ident())
    sampler.start()
    taken = first_token(engine, prompt, steps=steps)
    where, counts = sampler.end(), engine.tiers.counts
    engine.core.scheduler.kv.flush()
    return {
        "ms": round(1e3 * taken, 1),
        "steps_ms": [round(1e3 * seconds, 1) for seconds in steps if seconds > 0.005],
        "late": late,
        "where": where,
        "recomputed": counts.recomputed - before.recomputed,
        "from_disk": counts.loads_disk - before.loads_disk,
    }


# ------------------------------------------------------------ pieces


def options(sizes: Sizes) -> dict[str, Any]:
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "kv_cache_memory": sizes.pool,
        "max_model_len": sizes.far + 64,
        "seed": 0,
    }


def prompt_of(engine: Engine, num: int, seed: int) -> tuple[int, ...]:
    return random_tokens(random.Random(seed), num, engine.spec.vocab_size)


def first_token(
    engine: Engine, prompt: tuple[int, ...], source: str = "", steps: list[float] | None = None
) -> float:
    """Seconds; `steps` gets those of each turn."""
    wish = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = Request.new(next(IDS), prompt, wish, arrival=time.monotonic())
    request.kv_source = source
    begun, taken = time.perf_counter(), 0.0
    engine.core.add(request)
    while engine.core.has_work:
        turn = time.perf_counter()
        if any(event.tokens for event in engine.core.step()):
            taken = time.perf_counter() - begun
        if steps is not None:
            steps.append(time.perf_counter() - turn)
    return taken


def best_ms(times: dict[str, list[float]]) -> dict[str, float]:
    return {f"{name}_ms": round(1e3 * min(found), 1) for name, found in times.items()}


def facts(engine: Engine) -> dict[str, object]:
    """What was loaded from where, and at which rates."""
    assert engine.tiers is not None
    counts, tempo = engine.tiers.counts, engine.tiers.tempo
    loads = {
        "memory": counts.loads_memory,
        "disk": counts.loads_disk,
        "remote": counts.loads_remote,
    }
    rates = {"disk": tempo.seconds_per_byte, "lift": tempo.seconds_per_lifted}
    gb_s = {name: round(1e-9 / one, 2) for name, one in rates.items() if one}
    return {"loads": loads, "recomputed": counts.recomputed, "gb_s": gb_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="8b")
    parser.add_argument("--only", default="through,host,disk,apart")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--scratch", help="a folder for the disk; a temporary one otherwise")
    parser.add_argument("--lend", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lend:
        lend(args.lend)
        return
    sizes = Sizes(64, 512, 8192, 32_768, 12 * GIB, 10 * GIB, 16 * GIB, args.rounds)
    config = dict(SHAPES[args.shape])
    if args.rehearse:
        sizes, config = Sizes(4, 32, 256, 512, 1 << 26, 1 << 26, 1 << 28, 1), shrunk(config)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        bench = Bench(write_shape(config, Path(scratch) / "model"), sizes, Path(scratch))
        whats: dict[str, Callable[[], dict[str, object]]] = {
            what.__name__: what for what in (bench.through, bench.host, bench.disk, bench.apart)
        }
        for name in args.only.split(","):
            begun = time.perf_counter()
            found = {"shape": args.shape, name: whats[name]()}
            print(json.dumps(found), flush=True)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()

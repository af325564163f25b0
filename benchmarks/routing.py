"""What the router is worth: two replicas under conversations that share their beginnings.

Many conversations in a few groups, each group with a system prompt of its own, take turns; every
turn repeats what was said before. The caches of both replicas together hold all of it, one alone
does not. The same load runs through `quire router` with each policy, and once with one replica
whose cache holds everything: no router can hit more often. Prints one JSON line. Shares of cached
tokens are firm on a busy machine; seconds are not.

    python benchmarks/routing.py                            a random model of 7M parameters
    python benchmarks/routing.py --model smollm2-135m-instruct --conversations 12
    python benchmarks/routing.py --predict                  the same load, simulated
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from quire.router.settings import Policy
from tests.e2e.harness import Served, free_port, wait_until
from tests.e2e.raw import request_bytes
from tests.tiny_folder import write_tiny_folder

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8_192,
}
POLICIES: tuple[Policy, ...] = ("prefix", "round-robin")
WORDS = range(10, 250)  # token ids that every model has
PAGE = 16
HIT_GOAL, TTFT_GOAL = 0.95, 2.0  # of one replica's hit rate; times round robin's first token


@dataclass(frozen=True, slots=True)
class Load:
    groups: int
    system: int  # tokens of a group's system prompt
    conversations: int
    turns: int
    said: int  # tokens that a turn adds
    answer: int
    clients: int
    seed: int

    @property
    def held(self) -> int:
        """Tokens that a cache must hold to forget nothing."""
        own = self.turns * self.said + PAGE
        return self.groups * self.system + self.conversations * own

    def prompts(self) -> list[tuple[int, list[int]]]:
        """(conversation, tokens) of every request, in the order in which they are sent."""
        draw = random.Random(self.seed)

        def tokens(count: int) -> list[int]:
            return draw.choices(WORDS, k=count)

        systems = [tokens(self.system) for _ in range(self.groups)]
        said = [list(systems[number % self.groups]) for number in range(self.conversations)]
        order, found = list(range(self.conversations)), []
        for _ in range(self.turns):
            draw.shuffle(order)
            for number in order:
                said[number] = said[number] + tokens(self.said)
                found.append((number, said[number]))
        return found


class Answered(NamedTuple):
    first_s: float
    num_prompt: int
    num_cached: int


async def answered(port: int, tokens: Sequence[int], num_answer: int) -> Answered:
    body = {
        "prompt": list(tokens),
        "max_tokens": num_answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_bytes("/v1/completions", body, headers={"Connection": "close"}))
    got, first = b"", 0.0
    while part := await reader.read(1 << 16):
        got += part
        if not first and b"data: " in got:
            first = time.perf_counter() - begun
    writer.close()
    if b"data: [DONE]" not in got:
        raise RuntimeError(f"a stream ended early: {got[-300:]!r}")
    last = [line for line in got.split(b"\n") if line.startswith(b"data: {")][-1]
    usage = json.loads(last[6:])["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answered(first, int(usage["prompt_tokens"]), int(cached))


async def drive(port: int, load: Load) -> list[Answered]:
    """So many clients at a time; a conversation waits for its own last answer."""
    work = iter(load.prompts())
    speaking = [asyncio.Lock() for _ in range(load.conversations)]

    async def client() -> list[Answered]:
        found = []
        for number, tokens in work:
            async with speaking[number]:
                found.append(await answered(port, tokens, load.answer))
        return found

    several = await asyncio.gather(*(client() for _ in range(load.clients)))
    return [one for found in several for one in found]


# ------------------------------------------------------------ processes


@contextmanager
def routed(engines: Sequence[Served], model: Path, policy: str) -> Iterator[int]:
    """The port of a router in front of them, which knows all of them."""
    port = free_port()
    words = [sys.executable, "-m", "quire", "router", "--port", str(port), "--policy", policy]
    words += ["--tokenizer", str(model), "--log-level", "warning"]
    words += [word for one in engines for word in ("--upstream", one.url)]
    process = subprocess.Popen(words)

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/router/upstreams") as answer:
                return all(one["state"] == "up" for one in json.load(answer)["data"])
        except OSError:
            return False

    try:
        wait_until(is_up, 60.0, "the router knows its servers")
        yield port
    finally:
        process.terminate()
        process.wait(40.0)


def measured(engines: Sequence[Served], model: Path, policy: str, load: Load) -> dict[str, Any]:
    for engine in engines:
        engine.post("/admin/flush_cache", {})
    with routed(engines, model, policy) as port:
        begun = time.perf_counter()
        found = asyncio.run(drive(port, load))
        seconds = time.perf_counter() - begun
    firsts = sorted(one.first_s for one in found)
    prompt, cached = sum(one.num_prompt for one in found), sum(one.num_cached for one in found)
    return {
        "hit_rate": round(cached / prompt, 4),
        "computed_tokens": prompt - cached,
        "ttft_ms_mean": round(1e3 * statistics.fmean(firsts), 1),
        "ttft_ms_p50": round(1e3 * statistics.median(firsts), 1),
        "ttft_ms_p95": round(1e3 * firsts[int(0.95 * (len(firsts) - 1))], 1),
        "seconds": round(seconds, 1),
    }


def bytes_of_a_token(engine: Served) -> float:
    """The engine says so in its first report."""
    engine.complete("hello")

    def told() -> float:
        counts = engine.counts()
        return next(value for name, value in counts.items() if name.startswith("kv_token_bytes"))

    wait_until(lambda: told() > 0, 20.0, "the engine has reported")
    return told()


def compare(model: Path, flags: tuple[str, ...], load: Load, pool: float) -> dict[str, Any]:
    """`pool`: of all that must be held, how much each of the two replicas can hold."""
    flags = (*flags, "--threads", "1", "--max-num-seqs", str(load.clients))
    running = load.clients * (load.system + load.turns * load.said + load.answer + PAGE)

    with Served(model, *flags, "--kv-cache-memory", "1GiB") as one:
        token_bytes = bytes_of_a_token(one)
        if (1 << 30) / token_bytes < load.held + running:
            raise SystemExit("1 GiB does not hold this load: ask for fewer conversations")
        infinite = measured([one], model, "prefix", load)
    tokens = pool * load.held + running / 2
    small = (*flags, "--kv-cache-memory", str(int(tokens * token_bytes)))
    with Served(model, *small) as first, Served(model, *small) as second:
        several = {name: measured([first, second], model, name, load) for name in POLICIES}
    routed_, turns = several["prefix"], several["round-robin"]
    return {
        "one replica, unbounded": infinite,
        **several,
        "hit_rate_ratio": round(routed_["hit_rate"] / infinite["hit_rate"], 4),
        "ttft_gain": round(turns["ttft_ms_mean"] / routed_["ttft_ms_mean"], 2),
        "computed_gain": round(turns["computed_tokens"] / routed_["computed_tokens"], 2),
        "goals": {"hit_rate_ratio": HIT_GOAL, "ttft_gain": TTFT_GOAL},
    }


# ------------------------------------------------------------ simulated


def predicted(model: Path, load: Load, pool: float) -> dict[str, Any]:
    """The same load on simulated engines, from what steps take here."""
    from quire import LLM
    from quire.bench.serve.work import Ask
    from quire.bench.step_costs import measure_costs
    from quire.sim.engine import SimEngine
    from quire.sim.simulate import Fleet, simulate

    llm = LLM(str(model), device="cpu", load_format="dummy", num_threads=1,
              max_num_seqs=load.clients, skip_tokenizer_init=True)  # fmt: skip
    engine = SimEngine.of(measure_costs(llm._engine, "routing", clock=time.process_time))
    prompts = load.prompts()
    asks = [Ask(0.0, " ".join(map(str, tokens)), len(tokens), load.answer) for _, tokens in prompts]
    speakers = [number for number, _ in prompts]
    running = load.clients * (load.system + load.turns * load.said + load.answer + PAGE)
    small = replace(engine, num_pages=int(pool * load.held + running / 2) // PAGE)

    def told(fleet: Fleet) -> dict[str, Any]:
        done = simulate(fleet, asks, load.clients, speakers)
        firsts = sorted(o.token_times[0] - o.sent for o in done.outcomes)
        queried, hit = done.stats.prefix_query_tokens, done.stats.prefix_hit_tokens
        return {
            "hit_rate": round(hit / queried, 4),
            "computed_tokens": queried - hit,
            "ttft_ms_mean": round(1e3 * statistics.fmean(firsts), 1),
            "ttft_ms_p50": round(1e3 * statistics.median(firsts), 1),
            "seconds": round(done.seconds, 1),
        }

    endless = replace(engine, num_pages=(load.held + running) // PAGE)
    one = told(Fleet(endless))
    return {"one replica, unbounded": one, **{p: told(Fleet(small, 2, p)) for p in POLICIES}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a folder or a known name; else a small random model")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--system", type=int, default=1024, help="tokens of a system prompt")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--said", type=int, default=32, help="tokens that a turn adds")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pool", type=float, default=0.55, help="of all tokens, in each replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", action="store_true", help="simulate; start no server")
    args = parser.parse_args()
    load = Load(
        *(args.groups, args.system, args.conversations, args.turns, args.said, args.answer),
        clients=args.clients,
        seed=args.seed,
    )
    if args.model:
        from quire.load.hub import resolve_model

        model, flags = Path(resolve_model(args.model)), ("--device", "cpu")
    else:
        folder = tempfile.mkdtemp(prefix="quire-routing-")
        model = write_tiny_folder(Path(folder), **SMALL)
        flags = ("--device", "cpu", "--load-format", "dummy")
    if args.predict:
        found = predicted(model, load, args.pool)
    else:
        found = compare(model, flags, load, args.pool)
    print(json.dumps({"benchmark": "routing", "load": vars(args), **found}))


if __name__ == "__main__":
    main()

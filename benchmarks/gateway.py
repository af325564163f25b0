"""One server, many models: what batches, cached answers and parked models cost those who wait.

Starts `quire serve` for each mode and prints one JSON line for it. Phases that are compared take
turns, because other work on the machine comes and goes. Clients share the cores with the server.

    python benchmarks/gateway.py batch --model smollm2-135m-instruct   first tokens beside a batch
    python benchmarks/gateway.py batch                                 the same, a tiny random model
    python benchmarks/gateway.py auto --requests 200                   a small and a large model
    python benchmarks/gateway.py parked --rounds 5                     weights dropped and back
    python benchmarks/gateway.py draft --model smollm2-135m-instruct   near-repeats, sooner
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gateway_auto import choose, serving
from benchmarks.gateway_draft import near_repeats
from benchmarks.gateway_parked import park
from tests.e2e.harness import Served, wait_until
from tests.e2e.raw import request_bytes
from tests.tiny_folder import write_tiny_folder

WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "paper",
    "music",
    "winter",
    "engine",
    "market",
    "bridge",
    "letter",
    "summer",
    "table",
    "mountain",
    "signal",
    "copper",
    "harbour",
    "lantern",
    "orchard",
    "thunder",
]
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4_096,
}
TOLD_S = 1.5  # counts come once a second


@dataclass(frozen=True, slots=True)
class Plan:
    model: Path
    flags: tuple[str, ...]
    rounds: int
    requests: int  # in each phase
    every_s: float  # between two of them
    seed: int

    def served(self, *more: str) -> Served:
        return Served(self.model, *self.flags, *more)


def text(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


# ------------------------------------------------------------ clients


class Heard(NamedTuple):
    """One streamed answer: seconds from the planned moment to the first token, and the gaps."""

    first_s: float
    gaps_s: list[float]


async def streamed(port: int, body: dict[str, Any], due: float) -> Heard:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {**body, "stream": True}
    writer.write(request_bytes("/v1/completions", body, headers={"Connection": "close"}))
    times, tail = [], b""
    while part := await reader.read(1 << 16):
        tail = (tail + part)[-2_000:]
        if b'"text"' in part:
            times.append(time.perf_counter())
    writer.close()
    if b"data: [DONE]" not in tail or not times:
        raise RuntimeError(f"a stream ended early: {tail[-300:]!r}")
    return Heard(times[0] - due, [b - a for a, b in itertools.pairwise(times)])


async def visitors(served: Served, plan: Plan, draw: random.Random, **fields: Any) -> list[Heard]:
    """Short requests at fixed moments, whatever became of those before."""
    begun = time.perf_counter()
    bodies = [
        {"prompt": text(draw, 12), "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
        for _ in range(plan.requests)
    ]
    return await asyncio.gather(
        *(
            streamed(served.port, body, begun + number * plan.every_s)
            for number, body in enumerate(bodies)
        )
    )


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def told(heard: Sequence[Heard]) -> dict[str, float]:
    firsts = [one.first_s for one in heard]
    gaps = [gap for one in heard for gap in one.gaps_s]
    return {
        **{f"ttft_ms_p{p}": round(1e3 * percentile(firsts, p / 100), 1) for p in (50, 90, 99)},
        **{f"gap_ms_p{p}": round(1e3 * percentile(gaps, p / 100), 1) for p in (50, 99)},
    }


# ------------------------------------------------------------ batches


def upload(served: Served, lines: Sequence[dict[str, Any]]) -> str:
    mark = uuid.uuid4().hex
    data = "\n".join(json.dumps(line) for line in lines)
    form = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        f"{data}\r\n--{mark}--\r\n"
    )
    request = urllib.request.Request(
        served.url + "/v1/files",
        data=form.encode(),
        headers={"content-type": f"multipart/form-data; boundary={mark}"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["id"])


def long_lines(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Prompts from one sentence to several pages."""
    return [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "prompt": f"{number} " + text(draw, draw.choice((20, 80, 300, 900))),
                "max_tokens": 64,
                "temperature": 0,
                "ignore_eos": True,
            },
        }
        for number in range(count)
    ]


def begin_batch(served: Served, file_id: str) -> str:
    wish = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch_id = str(served.post("/v1/batches", wish)[1]["id"])
    wait_until(lambda: count(served, "num_requests_running") > 0, 60.0, "lines run")
    time.sleep(TOLD_S)
    return batch_id


def end_batch(served: Served, batch_id: str) -> None:
    served.post(f"/v1/batches/{batch_id}/cancel", {})
    wait_until(
        lambda: served.get(f"/v1/batches/{batch_id}")[1]["status"] == "cancelled",
        60.0,
        "the batch is cancelled",
    )
    wait_until(lambda: count(served, "num_requests_running") == 0, 60.0, "nothing runs")
    time.sleep(TOLD_S)


def count(served: Served, name: str) -> float:
    return sum(v for key, v in served.counts().items() if key.partition("{")[0] == name)


def batch(plan: Plan) -> dict[str, Any]:
    """Visitors of an idle server and of one that works through a batch, in turn."""
    draw = random.Random(plan.seed)
    heard: dict[str, list[Heard]] = {"idle": [], "batch": []}
    rates: dict[str, list[float]] = {"alone": [], "visited": []}
    with plan.served() as served:
        file_id = upload(served, long_lines(20_000, draw))
        asyncio.run(visitors(served, plan, draw))  # warm
        for _ in range(plan.rounds):
            heard["idle"] += asyncio.run(visitors(served, plan, draw))
            batch_id = begin_batch(served, file_id)
            rates["alone"].append(fed_rate(served, lambda: time.sleep(4.0)))
            found: list[Heard] = []

            def visit(found: list[Heard] = found) -> None:
                found += asyncio.run(visitors(served, plan, draw))

            rates["visited"].append(fed_rate(served, visit))
            heard["batch"] += found
            end_batch(served, batch_id)
    idle, beside = told(heard["idle"]), told(heard["batch"])
    return {
        "requests": len(heard["idle"]),
        "every_s": plan.every_s,
        "idle": idle,
        "batch": beside,
        "ttft_p50_ratio": round(beside["ttft_ms_p50"] / idle["ttft_ms_p50"], 3),
        "ttft_p99_ratio": round(beside["ttft_ms_p99"] / idle["ttft_ms_p99"], 3),
        "tokens_per_s_of_batch_alone": round(statistics.median(rates["alone"]), 1),
        "tokens_per_s_with_visitors": round(statistics.median(rates["visited"]), 1),
    }


def fed_rate(served: Served, work: Callable[[], None]) -> float:
    """Tokens a second that steps were fed meanwhile."""
    name = "iteration_tokens_total_sum"
    before, begun = count(served, name), time.perf_counter()
    work()
    return (count(served, name) - before) / (time.perf_counter() - begun)


# ------------------------------------------------------------ other modes


def draft(plan: Plan) -> dict[str, Any]:
    """Near-repeats with the cache of answers, and without; hints alone, and with a suffix tree."""
    found: dict[str, Any] = {}
    for method in ("hint", "hint+suffix"):
        config = json.dumps({"method": method})
        with plan.served("--answer-cache", "draft", "--speculative-config", config) as served:
            served.complete()
            found[method] = near_repeats(served, plan.rounds, num_tokens=160)
    return found


def auto(plan: Plan) -> dict[str, Any]:
    """Two models and who answers; `--requests` questions are learned from, as many judged."""
    return choose(plan.requests, plan.requests)


def parked(plan: Plan) -> dict[str, Any]:
    """The default model and Qwen 0.5B on one server; each is parked while the other answers."""

    async def visit(served: Served, draw: random.Random, model: str, count: int) -> list[Heard]:
        return await visitors(served, replace(plan, requests=count), draw, model=model)

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "two") as served:
        draw = random.Random(plan.seed)
        return park(served, ("small", "large"), draw, plan.rounds, visit, told)


# ------------------------------------------------------------ command line

MODES: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "batch": batch,
    "draft": draft,
    "auto": auto,
    "parked": parked,
}
ONE_MODEL = ("batch", "draft")  # the others have their own two


def make_plan(args: argparse.Namespace, folder: Path) -> Plan:
    flags: tuple[str, ...] = ("--threads", str(args.threads)) if args.threads else ()
    if args.model is None:
        model = write_tiny_folder(folder, **SMALL)
        flags = (*flags, "--device", "cpu", "--load-format", "dummy")
    else:
        from quire.load.hub import resolve_model

        model = Path(resolve_model(args.model))
    return Plan(model, flags, args.rounds, args.requests, args.every, args.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--model", help="default: a random model of 7M parameters")
    parser.add_argument("--threads", type=int, help="of the engine (default: its own choice)")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=30, help="of a phase")
    parser.add_argument("--every", type=float, default=0.3, help="seconds between two requests")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := set(args.modes) - MODES.keys():
        parser.error(f"unknown mode {sorted(unknown)[0]!r}, want one of {', '.join(MODES)}")
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(args, Path(folder))
        about = {"cores": os.cpu_count()}
        for mode in args.modes or MODES:
            begun = time.perf_counter()
            found = MODES[mode](plan)
            if mode in ONE_MODEL:
                found = {"model": args.model or "tiny random llama"} | found
            took = round(time.perf_counter() - begun, 1)
            print(json.dumps({"what": f"gateway {mode}", **about, **found, "took_s": took}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""quire bench serve: load on a running server, ours or any that speaks OpenAI's API."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest, NotSupported, QuireError

if TYPE_CHECKING:
    from quire.bench.serve.client import Outcome, Target
    from quire.bench.serve.work import Ask

EXAMPLES = """
quire bench serve --concurrency 32 --requests 256
quire bench serve --rate 4 --lengths sharegpt --slo ttft=500,gap=100
quire bench serve --rate 8 --burst 16 --out out/quire --url http://127.0.0.1:8000
quire bench serve --trace trace.jsonl --model Qwen/Qwen3-8B --url http://gpu:30000 --api chat
"""
SHOWN = ("ttft_ms", "gap_ms", "tpot_ms", "e2e_ms", "client_lag_ms")
MAX_CLIENTS = 100_000


def serve_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--url", "of the server", default="http://127.0.0.1:8000", metavar="URL")
    flag("--model", "as the server names it", default="default", metavar="NAME")
    flag("--api", "completions or chat", choices=("completions", "chat"), default="completions")
    flag("--api-key", "sent as a bearer token", default="", metavar="KEY")
    work_flags(parser)
    flag("--no-ignore-eos", "let answers end early", action="store_true")
    flag("--warmup", "requests before, not measured", type=int, default=4, metavar="N")
    flag("--timeout", "of a request, seconds", type=float, default=600.0, metavar="S")
    flag("--out", "write OUT.json and OUT.png", metavar="OUT")


def work_flags(parser: VerbParser) -> None:
    """Who asks when, for how much, and what is promised to them."""
    flag = parser.flag
    flag("--requests", "how many (default: 64, or all of a trace)", type=positive, metavar="N")
    flag("--rate", "open loop: requests a second, Poisson", type=float, metavar="R")
    flag("--burst", "... so many at a time", type=positive, default=1, metavar="N")
    flag("--trace", "open loop: times and lengths from JSON lines", metavar="FILE")
    flag("--concurrency", "closed loop: clients (default: 8)", type=positive, metavar="N")
    flag("--lengths", "sharegpt, in place of the two below", choices=("sharegpt",))
    flag("--prompt-len", "tokens, a number or a span", default="128", metavar="A-B")
    flag("--output-len", "tokens, a number or a span", default="64", metavar="A-B")
    flag("--shared-prefix", "words all prompts begin with", type=int, default=0, metavar="N")
    flag("--slo", "goodput: ms, such as ttft=200,gap=50,tpot=40,e2e=5000", metavar="LIMITS")
    flag("--seed", "of times, lengths and words", type=int, default=0, metavar="N")


def measure_serve(args: Namespace) -> int:
    from quire.bench.serve.drive import run
    from quire.bench.serve.figures import Promise, figures
    from quire.bench.serve.work import busiest_second

    promise = Promise.parse(args.slo) if args.slo else None
    target, asks = _target(args), asks_of(args)
    is_open = args.rate is not None or args.trace is not None
    clients = None if is_open else args.concurrency or 8
    if is_open:
        note(f"{len(asks)} requests over {asks[-1].at:.1f} s, at most "
             f"{busiest_second([ask.at for ask in asks])} in one second")  # fmt: skip
    outcomes = run(target, asks, clients, _warmup(args))
    record = {"what": "serve", **_settings(args, clients), **figures(outcomes, promise)}
    if args.out:
        _save(record, outcomes, Path(args.out))
    if not args.json:
        show_figures(record)
    print_json(record)
    if record["failed"] == record["requests"]:
        raise QuireError(f"no request was answered: {record['failure_details']}")
    return 0


def _target(args: Namespace) -> Target:
    from quire.bench.serve.client import Target

    made = Target(
        args.url, args.model, args.api, args.api_key, not args.no_ignore_eos, args.timeout
    )
    assert made.address  # raises BadRequest
    return made


def asks_of(args: Namespace) -> list[Ask]:
    from quire.bench.serve.work import asks, drawn_sizes, poisson_times, read_trace

    given = [name for name in ("rate", "trace", "concurrency") if getattr(args, name) is not None]
    if len(given) > 1:
        raise BadRequest(f"got --{' and --'.join(given)}, want one: each says when to send")
    if args.concurrency is not None and args.concurrency > MAX_CLIENTS:
        raise BadRequest(f"got --concurrency {args.concurrency}, want at most {MAX_CLIENTS}")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        raise BadRequest(f"got --rate {args.rate:g}, want requests a second above 0")
    if args.trace is not None:
        trace = read_trace(Path(args.trace), args.requests)
        return asks(trace.times, trace.sizes, args.seed, args.shared_prefix)
    count = args.requests or 64
    sizes = drawn_sizes(count, _lengths(args), args.seed)
    times = [0.0] * count
    if args.rate is not None:
        times = poisson_times(count, args.rate, args.burst, args.seed)
    return asks(times, sizes, args.seed, args.shared_prefix)


def _lengths(args: Namespace) -> Any:
    from quire.bench.serve.work import SHAREGPT, Lengths
    from quire.bench.workload import Span

    if args.lengths == "sharegpt":
        return SHAREGPT
    return Lengths(Span.parse(args.prompt_len), Span.parse(args.output_len))


def _warmup(args: Namespace) -> list[Ask]:
    """The same kind of work with other words, so that no prefix is cached by it."""
    from quire.bench.serve.work import asks, drawn_sizes

    count, seed = max(0, args.warmup), args.seed + 1
    return asks([0.0] * count, drawn_sizes(count, _lengths(args), seed), seed)


def _settings(args: Namespace, clients: int | None) -> dict[str, Any]:
    """What was asked for, so that a saved file says how to repeat it."""
    names = ("url", "model", "api", "rate", "burst", "trace", "lengths", "prompt_len")
    shown = {name: getattr(args, name) for name in (*names, "output_len", "shared_prefix", "seed")}
    if args.lengths or args.trace:
        shown["prompt_len"] = shown["output_len"] = None
    return shown | {"concurrency": clients, "slo": args.slo, "loop": _loop(clients)}


def _loop(clients: int | None) -> str:
    return "open: latency counts from the time a request was meant" if clients is None else "closed"


def show_figures(record: dict[str, Any]) -> None:
    columns = ("ms", "p50", "p90", "p95", "p99", "p99.9", "max", "mean")
    rows = [
        (name.removesuffix("_ms").replace("_", " "), *record[name].values())
        for name in SHOWN
        if record[name] is not None
    ]
    print_table(columns, rows)
    failed = "".join(f", {count} {kind}" for kind, count in record["failures"].items())
    print(
        f"\n{record['requests']} requests in {record['seconds']} s{failed};"
        f" {record['output_tokens_per_s']} output tokens/s\n"
    )
    if "goodput" in record:
        good = record["goodput"]
        print(f"goodput: {good['requests_per_s']} requests/s, {good['share']:.1%} of all\n")


def _save(record: dict[str, Any], outcomes: list[Outcome], out: Path) -> None:
    from quire.bench.serve.plot import plot_load

    data = {**record, "outcomes": [asdict(outcome) for outcome in outcomes]}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
        note(f"saved {out}.json")
        plot_load(record, outcomes, Path(f"{out}.png"))
        note(f"saved {out}.png")
    except NotSupported as error:
        note(f"no plot: {error}")
    except OSError as error:
        raise BadRequest(f"cannot write to --out {out}: {error.strerror}") from error

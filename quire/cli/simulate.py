"""quire simulate: what a load would see of an engine, from a table of measured step times."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import asks_of, show_figures, work_flags
from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest, NotSupported

if TYPE_CHECKING:
    from quire.bench.serve.figures import Promise
    from quire.sim.simulate import SimEngine, Simulated

EXAMPLES = """
quire simulate costs.json --rate 4 --lengths sharegpt --slo ttft=500,gap=100
quire simulate costs.json --rates 1,2,4,8 --slo ttft=500 --out sweep
quire simulate costs.json --trace trace.jsonl --max-num-seqs 64 --price 2.50
quire bench costs --out costs.json
"""
CHANGES = ("max_num_seqs", "max_num_batched_tokens", "target_gap_ms")


def build_parser() -> VerbParser:
    purpose = "Predict latency and goodput of an engine under a load."
    parser = VerbParser("simulate", purpose, EXAMPLES, "COSTS")
    parser.add_argument("costs", metavar="COSTS", help="a file that 'quire bench costs' wrote")
    work_flags(parser)
    flag = parser.flag
    flag("--rates", "one simulation each: requests a second", type=_numbers, metavar="R,R")
    flag("--max-num-seqs", "most requests running at once", type=positive, metavar="N")
    flag("--max-num-batched-tokens", "most tokens of a step", type=positive, metavar="N")
    flag("--target-gap-ms", "most that prompts may hold up a token", type=float, metavar="MS")
    flag("--num-pages", "of the cache", type=positive, metavar="N")
    flag("--no-prefix-caching", "compute every prompt in full", action="store_true")
    flag("--price", "of an hour of the device, in any currency", type=float, metavar="X")
    flag("--out", "write OUT.json and OUT.png", metavar="OUT")
    flag("--json", "the JSON line only", action="store_true")
    return parser


def run(args: Namespace) -> int:
    from quire.bench.serve.figures import Promise
    from quire.sched.cost_table import CostTable
    from quire.sim.simulate import SimEngine

    promise = Promise.parse(args.slo) if args.slo else None
    engine = _changed(SimEngine.of(CostTable.read(Path(args.costs))), args)
    if args.rates:
        return _sweep(args, engine, promise)
    record, simulated = _one(args, engine, promise)
    if not args.json:
        show_figures(record)
    if args.out:
        _save(record, simulated, Path(args.out))
    print_json(record)
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def _changed(engine: SimEngine, args: Namespace) -> SimEngine:
    asked = {name: getattr(args, name) for name in CHANGES if getattr(args, name) is not None}
    return replace(
        engine,
        sched=replace(engine.sched, **asked),
        num_pages=args.num_pages or engine.num_pages,
        prefix_caching=not args.no_prefix_caching,
    )


def _one(
    args: Namespace, engine: SimEngine, promise: Promise | None
) -> tuple[dict[str, Any], Simulated]:
    from quire.bench.serve.figures import figures
    from quire.sim.simulate import simulate

    asks = asks_of(args)
    is_open = args.rate is not None or args.trace is not None
    simulated = simulate(engine, asks, None if is_open else args.concurrency or 8)
    found = figures(simulated.outcomes, promise)
    del found["client_lag_ms"]  # nobody is late here
    facts, stats = engine.costs.engine, simulated.stats
    record: dict[str, Any] = {
        "what": "simulate",
        "model": facts.model,
        "device": facts.device,
        "rate": args.rate,
        "slo": args.slo,
        **found,
        "client_lag_ms": None,
        "device_busy": round(simulated.utilisation, 4),
        "steps": stats.num_steps,
        "preempted": stats.num_preempted,
        "prefix_hit_rate": round(stats.prefix_hit_rate, 4),
        "fit_error": round(engine.costs.fit_error, 4),
    }
    if args.price is not None and found["output_tokens_per_s"]:
        per_token = args.price / 3600.0 / found["output_tokens_per_s"]
        record["price_per_million_output_tokens"] = round(per_token * 1e6, 4)
    return record, simulated


def _sweep(args: Namespace, engine: SimEngine, promise: Promise | None) -> int:
    if args.rate is not None or args.trace is not None or args.concurrency is not None:
        raise BadRequest("got --rates beside --rate, --trace or --concurrency; give one of them")
    records = []
    for rate in args.rates:
        own = Namespace(**{**vars(args), "rate": rate})
        records.append(_one(own, engine, promise)[0])
    if not args.json:
        columns = ("rate", "ttft p50", "ttft p99", "gap p50", "gap p99", "tok/s", "goodput")
        print_table(columns, [_row(record) for record in records])
        print()
    if args.out:
        _save_sweep(records, Path(args.out))
    print_json({"what": "simulate", "model": engine.costs.engine.model, "rates": records})
    return 0


def _row(record: dict[str, Any]) -> tuple[object, ...]:
    good = record.get("goodput")
    return (
        record["rate"],
        *(record["ttft_ms"][name] for name in ("p50", "p99")),
        *((record["gap_ms"] or {}).get(name, "-") for name in ("p50", "p99")),
        record["output_tokens_per_s"],
        "-" if good is None else f"{good['share']:.1%}",
    )


def _save(record: dict[str, Any], simulated: Simulated, out: Path) -> None:
    from quire.bench.serve.plot import plot_load

    data = {**record, "outcomes": [asdict(outcome) for outcome in simulated.outcomes]}
    _write(out, data)
    try:
        plot_load(record, simulated.outcomes, Path(f"{out}.png"))
        note(f"saved {out}.png")
    except NotSupported as error:
        note(f"no plot: {error}")


def _save_sweep(records: list[dict[str, Any]], out: Path) -> None:
    from quire.sim.plot import plot_sweep

    _write(out, {"rates": records})
    try:
        plot_sweep(records, Path(f"{out}.png"))
        note(f"saved {out}.png")
    except NotSupported as error:
        note(f"no plot: {error}")


def _write(out: Path, data: dict[str, Any]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").write_text(json.dumps(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write to --out {out}: {error.strerror}") from error
    note(f"saved {out}.json")

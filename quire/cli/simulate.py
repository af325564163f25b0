"""quire simulate: what a load would see of one engine or several, from a table of step times."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import asks_of, show_figures, work_flags
from quire.cli.parser import VerbParser, positive, size_bytes
from quire.cli.show import note, print_json, print_table, save_json
from quire.cli.simulate_plan import plan, plan_flags
from quire.errors import BadRequest, NotSupported
from quire.router.settings import POLICIES

if TYPE_CHECKING:
    from quire.bench.serve.figures import Promise
    from quire.sim.engine import SimEngine
    from quire.sim.simulate import Fleet, Simulated

EXAMPLES = """
quire simulate costs.json --rate 4 --lengths sharegpt --slo ttft=500,gap=100
quire simulate costs.json --rates 1,2,4,8 --slo ttft=500 --out sweep
quire simulate h200-8b --rate 40 --replicas 4 --lengths sharegpt --price 2.50
quire simulate h200-8b --device h100 -tp 2 --trace trace.jsonl
quire simulate h200-8b --rate 20 --prefill 1 --decode 2 --link 50 --slo ttft=500,gap=30
quire simulate roofline --shape FOLDER --device l40s -tp 4 --max-model-len 8192
quire simulate h200-8b --plan --prices h200=3.5,l40s=0.9 --rates 20,40 --slo ttft=300
quire bench costs --out costs.json
"""
CHANGES = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "target_gap_ms")
GB = 1e9
HOST_LINK = 50.0  # GB a second: PCIe 5.0 x16, less what is lost on the way


def build_parser() -> VerbParser:
    purpose = "Predict latency, goodput and price of one engine or several under a load."
    parser = VerbParser("simulate", purpose, EXAMPLES, "COSTS")
    parser.add_argument(
        "costs",
        metavar="COSTS",
        help="a file that 'quire bench costs' wrote, h200-8b, h200-0.6b, h200-14b, or roofline",
    )
    work_flags(parser)
    source_flags(parser)
    flag = parser.flag
    flag("--rates", "one simulation each: requests a second", type=_numbers, metavar="R,R")
    flag("--max-num-seqs", "most requests running at once", type=positive, metavar="N")
    flag("--max-num-batched-tokens", "most tokens of a step", type=positive, metavar="N")
    flag("--max-model-len", "most tokens of a request", type=positive, metavar="N")
    flag("--target-gap-ms", "most that prompts may hold up a token", type=float, metavar="MS")
    flag("--num-pages", "of the cache", type=positive, metavar="N")
    flag("--no-prefix-caching", "compute every prompt in full", action="store_true")
    cluster_flags(parser)
    plan_flags(parser)
    flag("--price", "of an hour of the device, in any currency", type=float, metavar="X")
    flag("--out", "write OUT.json and OUT.png", metavar="OUT")
    flag("--json", "the JSON line only", action="store_true")
    return parser


def source_flags(parser: VerbParser) -> None:
    """What steps are made of, and on which devices they run."""
    flag = parser.flag
    flag(
        "--shape",
        "of the model, where COSTS names none or another: 8b, 0.6b, 14b, a folder",
        metavar="NAME",
    )
    flag("--device", "scale the costs to h200, h100, a100, l40s or rtx4090", metavar="NAME")
    flag("--table-device", "what COSTS was measured on, where it does not say", metavar="NAME")
    for name, short, what in (
        ("--tensor-parallel-size", "-tp", "ranks that share each layer"),
        ("--pipeline-parallel-size", "-pp", "stages of layers"),
    ):
        parser.add_argument(name, short, help=what, type=positive, default=1, metavar="N")


def cluster_flags(parser: VerbParser) -> None:
    """How many engines there are, and where they keep pages."""
    flag = parser.flag
    flag("--replicas", "equal engines behind a router", type=positive, default=1, metavar="N")
    flag("--policy", "of the router", choices=POLICIES, default="prefix")
    flag(
        "--prefill",
        "engines that compute prompts for those that decode",
        type=positive,
        metavar="N",
    )
    flag("--decode", "... and of those that decode (default: 1)", type=positive, metavar="N")
    flag(
        "--link",
        "... GB a second of pages between two of them",
        type=float,
        default=25.0,
        metavar="X",
    )
    flag(
        "--kv-host-memory",
        "for pages that left the pool, such as 4GiB",
        type=size_bytes,
        metavar="SIZE",
    )
    flag("--kv-host-link", "... GB a second to a GPU's pool (default: 50)", type=float, metavar="X")
    flag("--kv-disk-size", "the same on a disk", type=size_bytes, metavar="SIZE")
    flag("--kv-disk-speed", "... GB a second from it", type=float, default=2.0, metavar="X")


def run(args: Namespace) -> int:
    from quire.bench.serve.figures import Promise

    _check_speeds(args)
    if args.plan:
        return plan(args)
    promise = Promise.parse(args.slo) if args.slo else None
    fleet = _fleet(args)
    if args.rates:
        return _sweep(args, fleet, promise)
    record, simulated = _one(args, fleet, promise)
    if not args.json:
        show_figures(record)
        _show_replicas(record)
        _show_costs(fleet.engine)
    if args.out:
        _save(record, simulated, Path(args.out))
    print_json(record)
    return 0


def _check_speeds(args: Namespace) -> None:
    for name in ("link", "kv_host_link", "kv_disk_speed"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise BadRequest(f"got --{name.replace('_', '-')} {value:g}, want GB a second above 0")


def _fleet(args: Namespace) -> Fleet:
    from quire.sim.engine import CPU
    from quire.sim.outside import Link, Places
    from quire.sim.simulate import Fleet

    if args.decode and not args.prefill:
        raise BadRequest("got --decode and no --prefill: give both, or --replicas")
    if args.prefill and args.replicas != 1:
        raise BadRequest("got --replicas beside --prefill; say with --decode how many decode")
    engine = _engine(args)
    is_cpu = engine.costs.engine.device == CPU
    if is_cpu and args.kv_host_link:
        raise BadRequest("got --kv-host-link for a CPU, whose pool is in memory of the host too")
    places = Places(
        memory=args.kv_host_memory or 0,
        memory_link=None if is_cpu else Link((args.kv_host_link or HOST_LINK) * GB),
        disk=args.kv_disk_size or 0,
        disk_link=Link(args.kv_disk_speed * GB),
        engines=Link(args.link * GB) if args.prefill else None,
    )
    engine = replace(engine, places=places)
    return Fleet(engine, args.decode or args.replicas, args.policy, args.prefill or 0)


def _engine(args: Namespace) -> SimEngine:
    from quire.sim.devices import device_named
    from quire.sim.engine import SimEngine
    from quire.sim.estimate import Layout
    from quire.sim.tables import Source

    source = Source.of(args.costs, args.shape, args.table_device)
    device = device_named(args.device) if args.device else None
    layout = Layout(args.tensor_parallel_size, args.pipeline_parallel_size)
    engine = _changed(SimEngine.of(source.on(device, layout)), args)
    is_scaled = engine.costs is not source.table
    if device is not None or is_scaled or not engine.num_pages:
        engine = source.sized(engine, device, layout)
    return replace(engine, num_pages=args.num_pages) if args.num_pages else engine


def _show_costs(engine: SimEngine) -> None:
    costs = engine.costs
    print(f"costs: {costs.label}{', ' if costs.source else ''}{costs.source}")
    if costs.engine.ranks * costs.engine.stages > 1:
        print("No run of Quire's ranks on several GPUs is known: what they would do is a forecast")
    print()


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def _changed(engine: SimEngine, args: Namespace) -> SimEngine:
    asked = {name: getattr(args, name) for name in CHANGES if getattr(args, name) is not None}
    sched = replace(engine.sched, **asked)
    return replace(engine, sched=sched, prefix_caching=not args.no_prefix_caching)


def _one(
    args: Namespace, fleet: Fleet, promise: Promise | None
) -> tuple[dict[str, Any], Simulated]:
    from quire.bench.serve.figures import figures
    from quire.sim.simulate import simulate

    asks = asks_of(args)
    is_open = args.rate is not None or args.trace is not None
    simulated = simulate(fleet, asks, None if is_open else args.concurrency or 8)
    found = figures(simulated.outcomes, promise)
    del found["client_lag_ms"]  # nobody is late here
    costs, stats = fleet.engine.costs, simulated.stats
    record: dict[str, Any] = {
        "what": "simulate",
        "model": costs.engine.model,
        "device": costs.engine.device,
        "rate": args.rate,
        "slo": args.slo,
        **found,
        "client_lag_ms": None,
        "device_busy": round(simulated.utilisation, 4),
        "steps": stats.num_steps,
        "preempted": stats.num_preempted,
        "prefix_hit_rate": round(stats.prefix_hit_rate, 4),
        "fit_error": round(costs.fit_error, 4),
        "costs": costs.label,
        "costs_source": costs.source,
        "devices": fleet.num_devices,
    }
    if fleet.replicas > 1:
        record |= {"policy": fleet.policy, "replicas": _replicas(simulated)}
    if fleet.prefill:
        busy = [round(node.busy_s / simulated.seconds, 4) for node in simulated.prefill]
        record |= {"prefill_busy": busy, "link_gb_s": args.link}
    if fleet.engine.places.is_any:
        record["outside"] = [asdict(node.outside) for node in simulated.nodes]
    if args.price is not None and found["output_tokens_per_s"]:
        per_token = args.price * record["devices"] / 3600.0 / found["output_tokens_per_s"]
        record["price_per_million_output_tokens"] = round(per_token * 1e6, 4)
    return record, simulated


def _replicas(simulated: Simulated) -> list[dict[str, Any]]:
    from quire.bench.serve.figures import spread, timings

    found = []
    for number, node in enumerate(simulated.nodes):
        own = [
            o for o, at in zip(simulated.outcomes, simulated.places, strict=True) if at == number
        ]
        found.append(
            {
                "requests": len(own),
                "prefix_hit_rate": round(node.stats.prefix_hit_rate, 4),
                "ttft_ms": spread([timings(outcome)["ttft"] for outcome in own]),
                "device_busy": round(node.busy_s / simulated.seconds, 4),
            }
        )
    return found


def _show_replicas(record: dict[str, Any]) -> None:
    if "replicas" not in record:
        return
    columns = ("replica", "requests", "prefix hits", "ttft p50", "ttft p99", "busy")
    rows = []
    for number, one in enumerate(record["replicas"]):
        ttft = one["ttft_ms"] or {}
        cells = (f"{one['prefix_hit_rate']:.1%}", ttft.get("p50", "-"), ttft.get("p99", "-"))
        rows.append((number, one["requests"], *cells, f"{one['device_busy']:.1%}"))
    print_table(columns, rows)
    print()


def _sweep(args: Namespace, fleet: Fleet, promise: Promise | None) -> int:
    if args.rate is not None or args.trace is not None or args.concurrency is not None:
        raise BadRequest("got --rates beside --rate, --trace or --concurrency; give one of them")
    records = []
    for rate in args.rates:
        own = Namespace(**{**vars(args), "rate": rate})
        records.append(_one(own, fleet, promise)[0])
    if not args.json:
        columns = ("rate", "ttft p50", "ttft p99", "gap p50", "gap p99", "tok/s", "goodput")
        print_table(columns, [_row(record) for record in records])
        print()
        _show_costs(fleet.engine)
    if args.out:
        _save_sweep(records, Path(args.out))
    costs = fleet.engine.costs
    print_json(
        {
            "what": "simulate",
            "model": costs.engine.model,
            "costs": costs.label,
            "costs_source": costs.source,
            "rates": records,
        }
    )
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
    save_json(out, data)
    try:
        plot_load(record, simulated.outcomes, Path(f"{out}.png"))
        note(f"saved {out}.png")
    except NotSupported as error:
        note(f"no plot: {error}")


def _save_sweep(records: list[dict[str, Any]], out: Path) -> None:
    from quire.sim.plot import plot_sweep

    save_json(out, {"rates": records})
    try:
        plot_sweep(records, Path(f"{out}.png"))
        note(f"saved {out}.png")
    except NotSupported as error:
        note(f"no plot: {error}")

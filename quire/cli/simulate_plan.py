"""quire simulate --plan: the devices and layouts that serve a load best, searched by simulation."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import asks_of
from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_json, print_table, save_json
from quire.errors import BadRequest, NotSupported

if TYPE_CHECKING:
    from quire.sim.engine import SimEngine
    from quire.sim.plan import Answer, Offered, Plan, Question

SHOWN = 5
SHORT_S = 20.0  # a load in which requests may end before too many wait
COLUMNS = ("devices", "engines", "rate", "kept", "ttft p99", "longest gap p99", "goodput", "tok/s")
UNPLANNED = ("replicas", "tensor_parallel_size", "pipeline_parallel_size")
ALONE = ("device", "price", "prefill", "decode", "num_pages", "kv_host_memory", "kv_disk_size")


def plan_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--plan", "search devices, ranks, stages and replicas", action="store_true")
    flag("--devices", "... so many in all", type=positive, default=8, metavar="N")
    flag("--kinds", "... of these, such as h200,h100 (default: those with a price)", metavar="A,B")
    flag("--prices", "... an hour of each, such as h200=3.5,h100=2.5", metavar="A=X,B=Y")
    flag("--apart", "... prompts on engines of their own too, over --link", action="store_true")
    flag("--budget", "... for an hour of all", type=float, metavar="X")
    flag("--attain", "share of requests that must keep --slo", type=float, default=0.9, metavar="X")


def plan(args: Namespace) -> int:
    from quire.sim.plan import search

    question = _question(args)
    shortest = min(load.asks[-1].at - load.asks[0].at for load in question.loads)
    if shortest < SHORT_S:
        note(f"the shortest load lasts {shortest:.1f} s: a queue that grows may not be seen;"
             " ask for more with --requests")  # fmt: skip
    found = search(question, (lambda line: None) if args.json else note)
    record = _record(args, question, found)
    if not args.json:
        _show(question, found)
    if args.out:
        _save(record, found, Path(args.out))
    print_json(record)
    return 0


def _question(args: Namespace) -> Question:
    from quire.bench.serve.figures import Promise
    from quire.sim.devices import device_named
    from quire.sim.outside import Link
    from quire.sim.plan import Question
    from quire.sim.tables import Source

    if not args.slo:
        raise BadRequest("got --plan and no --slo: say what counts as good, as --slo ttft=500")
    given = [getattr(args, name) for name in ALONE]
    if any(getattr(args, name) != 1 for name in UNPLANNED) or any(given):
        raise BadRequest(
            "got --plan beside --replicas, -tp, -pp, --device, --price, --prefill, --decode,"
            " --num-pages or a place for pages: the plan sets or leaves out these; see --devices,"
            " --kinds and --prices"
        )
    if not 0 < args.attain <= 1:
        raise BadRequest(f"got --attain {args.attain:g}, want a share above 0 and up to 1")
    source = Source.of(args.costs, args.shape, args.table_device)
    prices = _prices(args.prices or "")
    names = [name for name in (args.kinds or "").split(",") if name]
    devices = [device_named(name) for name in names or prices]
    if not devices and source.device is not None:
        devices = [source.device]
    if not devices:
        raise BadRequest("got --plan and no --kinds: say which devices, as --kinds h200,h100")
    _check_budget(args.budget, prices, [device.name for device in devices])
    loads = _loads(args)
    return Question(
        source=source,
        devices=devices,
        most=args.devices,
        loads=loads,
        promise=Promise.parse(args.slo),
        prices=prices,
        budget=args.budget,
        attain=args.attain,
        policy=args.policy,
        apart=Link(args.link * 1e9) if args.apart else None,
        settle=lambda engine: _settled(engine, args, loads),
    )


def _check_budget(budget: float | None, prices: dict[str, float], names: list[str]) -> None:
    if budget is None:
        return
    unpriced = [name for name in names if name not in prices]
    if unpriced:
        raise BadRequest(f"got --budget and no price of {', '.join(unpriced)}; give --prices")
    cheapest = min(prices[name] for name in names)
    if not budget >= cheapest:
        raise BadRequest(f"got --budget {budget:g}, which is less than a device's {cheapest:g}")


def _prices(text: str) -> dict[str, float]:
    from quire.sim.devices import device_named

    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[device_named(name).name] = float(value)
        except ValueError:
            found[name] = 0.0
        if not found[name] > 0:
            raise BadRequest(f"got --prices {text!r}, want such as h200=3.5,h100=2.5")
    return found


def _loads(args: Namespace) -> list[Offered]:
    from quire.sim.plan import Offered

    if args.concurrency is not None or (args.rates and (args.rate or args.trace)):
        raise BadRequest("got --plan; give one of --rate, --rates and --trace with it")
    if args.rates:
        several = [Namespace(**{**vars(args), "rate": rate}) for rate in args.rates]
        return [Offered(one.rate, asks_of(one)) for one in several]
    if args.rate is None and args.trace is None:
        raise BadRequest("got --plan and no load; give --rate, --rates or --trace")
    asks = asks_of(args)
    lasted = max(asks[-1].at - asks[0].at, 1e-3)
    return [Offered(args.rate or len(asks) / lasted, asks)]


def _settled(engine: SimEngine, args: Namespace, loads: list[Offered]) -> SimEngine:
    """With the limits that were asked for; requests may be as long as the load's longest."""
    longest = max(one.num_prompt + one.num_output for load in loads for one in load.asks)
    asked: dict[str, Any] = {"max_model_len": min(engine.sched.max_model_len, longest)}
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "target_gap_ms"):
        if getattr(args, name) is not None:
            asked[name] = getattr(args, name)
    sched = replace(engine.sched, **asked)
    return replace(engine, sched=sched, prefix_caching=not args.no_prefix_caching)


def _record(args: Namespace, question: Question, found: Plan) -> dict[str, Any]:
    by_goodput, by_cost = found.by_goodput(), found.by_cost()
    return {
        "what": "plan",
        "model": question.source.name,
        "slo": args.slo,
        "attain": args.attain,
        "rates": [load.rate for load in question.loads],
        "requests": [len(load.asks) for load in question.loads],
        "best_by_goodput": by_goodput[0].record() if by_goodput else None,
        "best_by_cost": by_cost[0].record() if by_cost else None,
        "options": [one.record() for one in found.answers],
        "refused": [
            {"device": one.device, "tp": one.layout.tp, "pp": one.layout.pp, "why": one.why}
            for one in found.refused
        ],
    }


def _show(question: Question, found: Plan) -> None:
    columns = (*COLUMNS, "price/h", "price/M", "costs")
    by_goodput, by_cost = found.by_goodput(), found.by_cost()
    if not by_goodput:
        print(f"no option keeps the promise for {question.attain:.0%} of the requests\n")
    else:
        print_table(columns, [_row(one) for one in by_goodput[:SHOWN]], "best by goodput")
        print()
    if by_cost:
        title = "best by the price of a million output tokens"
        print_table(columns, [_row(one) for one in by_cost[:SHOWN]], title)
        print()
    for one in found.refused:
        print(f"{one.layout} of {one.device} was not tried: {one.why}")
    if any(one.option.layout.num_devices > 1 for one in found.answers):
        print("No run of Quire's ranks on several GPUs is known: what they would do is a forecast")
    print()


def _row(one: Answer) -> tuple[object, ...]:
    assert one.best is not None
    option, best = one.option, one.best
    return (
        f"{option.num_devices} {option.device.name}",
        option.engines,
        f"{best.rate:g}",
        f"{best.share:.1%}",
        best.ttft_ms.get("p99", "-"),
        best.longest_gap_ms.get("p99", "-"),
        f"{one.goodput:.2f}",
        f"{best.good_tokens_s:.0f}",
        "-" if one.price is None else f"{one.price:.2f}",
        "-" if one.cost is None else f"{one.cost:.3f}",
        one.label,
    )


def _save(record: dict[str, Any], found: Plan, out: Path) -> None:
    from quire.sim.plan_plot import plot_plan

    save_json(out, record)
    try:
        plot_plan(found, f"{record['model']}, {record['slo']}, simulated", Path(f"{out}.png"))
        note(f"saved {out}.png")
    except NotSupported as error:
        note(f"no plot: {error}")

"""quire bench: measurements, each a table and, as the last line, one JSON object."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cli.bench_costs import EXAMPLES as COSTS
from quire.cli.bench_costs import costs_flags, measure_step_costs
from quire.cli.bench_cpu import EXAMPLES as CPU
from quire.cli.bench_cpu import cpu_flags, measure_cpu
from quire.cli.bench_serve import EXAMPLES as SERVE
from quire.cli.bench_serve import measure_serve, serve_flags
from quire.cli.engine_flags import (
    add_engine_flags,
    add_model,
    engine_args,
    engine_options,
    model_of,
    open_llm,
)
from quire.cli.main import did_you_mean
from quire.cli.parser import VerbParser, positive
from quire.cli.show import note, print_json, print_table
from quire.errors import BadRequest, NotSupported, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM

EXAMPLES = """
quire bench throughput --requests 64
quire bench latency --prompt-len 512 --output-len 64
quire bench startup
quire bench ladder --quick
quire bench cpu --against llama.cpp,transformers
quire bench serve --rate 4 --lengths sharegpt
quire bench h200 --rows decode-8b,prefill-8b
quire bench profile --shape 8b --batches 1,32,256
"""
THROUGHPUT = """
quire bench throughput
quire bench throughput --requests 64 --prompt-len 64-256 --output-len 64-128
quire bench throughput ./folder-with-config --load-format dummy --json
"""
LATENCY = """
quire bench latency
quire bench latency --prompt-len 1024 --output-len 32 --repeats 5
"""
STARTUP = """
quire bench startup
quire bench startup qwen2.5-coder-0.5b-instruct --repeats 5 --json
"""
LADDER = """
quire bench ladder --quick
quire bench ladder --requests 32 --threads 2 --out out
quire bench ladder ./folder-with-config --load-format dummy --json
"""
H200 = """
quire bench h200 --rehearse
quire bench h200
quire bench h200 --rows start,decode-8b,prefill-8b-512 --max-seconds 300
quire bench h200 --from monday/h200.json tuesday/h200.json
"""
ROOFLINE = """
quire bench roofline out/h200.json --out roofline.png
"""
PROFILE = """
quire bench profile --shape 8b
quire bench profile --shape 0.6b --batches 1 --prefill 512,2048 --markdown
quire bench profile --batches 1,8 --context 64 --steps 8
"""


class Kind(NamedTuple):
    purpose: str
    examples: str
    add_flags: Callable[[VerbParser], None]
    measure: Callable[[Namespace], int]
    words: str = "[MODEL]"
    has_engine: bool = True


def build_parser() -> VerbParser:
    """Only the first word is looked at here; each kind of measurement has its own parser."""
    lines = "\n".join(f"  {name:<11} {kind.purpose}" for name, kind in KINDS.items())
    parser = VerbParser("bench", f"Measure the engine.\n\n{lines}", EXAMPLES, "KIND ...")
    parser.add_argument("kind", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("rest", nargs="...", help="'quire bench KIND --help' lists them")
    return parser


def run(args: Namespace) -> int:
    kind = KINDS.get(args.kind)
    if kind is None:
        raise BadRequest(f"unknown measurement {args.kind!r}{did_you_mean(args.kind, list(KINDS))}")
    parser = VerbParser(f"bench {args.kind}", kind.purpose, kind.examples, kind.words)
    if kind.words == "[MODEL]":
        add_model(parser)
    kind.add_flags(parser)
    parser.flag("--json", "the JSON line only", action="store_true")
    if kind.has_engine:
        add_engine_flags(parser)
    return kind.measure(parser.parse_args(args.rest))


# ---------------------------------------------------------------- throughput and latency


def _throughput_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--requests", "all present from the start", type=positive, default=32, metavar="N")
    flag("--prompt-len", "tokens, a number or a span", default="64-256", metavar="A-B")
    flag("--output-len", "tokens, a number or a span", default="64-128", metavar="A-B")


def _throughput(args: Namespace) -> int:
    from quire.bench.workload import Span, random_jobs

    prompts, outputs = Span.parse(args.prompt_len), Span.parse(args.output_len)
    llm = open_llm(args, skip_tokenizer_init=True)
    from quire.bench.offline import measure_throughput, vocab_size

    seed = args.engine_seed or 0
    jobs = random_jobs(args.requests, prompts, outputs, vocab_size(llm), seed)
    return _report(args, "throughput", measure_throughput(llm, jobs).as_dict())


def _latency_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--prompt-len", "tokens", type=positive, default=128, metavar="N")
    flag("--output-len", "tokens", type=positive, default=64, metavar="N")
    flag("--repeats", "medians are shown", type=positive, default=3, metavar="N")


def _latency(args: Namespace) -> int:
    from quire.bench.offline import measure_latency

    if args.output_len < 2:
        raise BadRequest("got --output-len 1, want at least 2: decoding starts after the first")
    llm = open_llm(args, skip_tokenizer_init=True)
    found = measure_latency(llm, args.prompt_len, args.output_len, args.repeats)
    return _report(args, "latency", found.as_dict())


# ---------------------------------------------------------------- start-up


def _startup_flags(parser: VerbParser) -> None:
    parser.flag("--repeats", "medians are shown", type=positive, default=3, metavar="N")


def _startup(args: Namespace) -> int:
    from quire.bench.startup import measure_startup
    from quire.cli.download import fetch

    found = measure_startup(str(fetch(model_of(args))), engine_options(args), args.repeats)
    return _report(args, "startup", found.as_dict())


def _report(args: Namespace, what: str, record: dict[str, Any]) -> int:
    if not args.json:
        print_table((what, ""), [(k.replace("_", " "), v) for k, v in record.items()])
        print()
    print_json({"what": what, "model": Path(model_of(args)).name, **record})
    return 0


# ---------------------------------------------------------------- ladder


def _ladder_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--quick", "few requests, short contexts", action="store_true")
    flag("--requests", "size of the workload (default: 24)", type=positive, metavar="N")
    flag("--no-cache-requests", "of these without a cache", type=int, metavar="N")
    flag("--budget-rows", "full-length requests that fit (default: 4)", type=positive, metavar="N")
    flag("--out", "folder for ladder.png and ladder.json", default="out", metavar="DIR")


def _ladder(args: Namespace) -> int:
    from quire.bench.ladder import Ladder, LadderOptions
    from quire.bench.report import LADDER_COLUMNS, identical_line, ladder_rows, ladder_summary

    names = ("requests", "no_cache_requests", "budget_rows", "max_model_len", "max_num_seqs")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    base = LadderOptions.quick() if args.quick else LadderOptions()
    options = replace(base, seed=args.engine_seed or 0, **given)
    say = (lambda text: None) if args.json else note
    result = Ladder(engine_args(args), options).climb(say)
    summary = {"model": Path(model_of(args)).name, **ladder_summary(result)}
    _save(summary, Path(args.out))
    if not args.json:
        print_table(LADDER_COLUMNS, ladder_rows(summary["rungs"]))
        print(f"\n{identical_line(result)}\n")
    print_json(summary)
    if result.differing and result.dtype == "float32":
        raise QuireError(f"{identical_line(result)}: a technique changed the answers")
    return 0


def _save(summary: dict[str, Any], folder: Path) -> None:
    from quire.bench.plot import plot_ladder

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ladder.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        plot_ladder(summary, folder / "ladder.png")
        note(f"saved {folder / 'ladder.json'} and {folder / 'ladder.png'}")
    except NotSupported as error:
        note(f"no plot: {error}")
    except OSError as error:
        raise BadRequest(f"cannot write to --out {folder}: {error.strerror}") from error


# ---------------------------------------------------------------- the H200 suite


def _h200_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--rows", "names or groups of rows, between commas (default: all)", metavar="NAMES")
    flag("--list", "show the rows and stop", action="store_true")
    flag("--out", "folder for h200.json, .md and .png", default="out", metavar="DIR")
    flag("--max-seconds", "begin no row too late", type=positive, default=540, metavar="N")
    flag("--rehearse", "tiny models, few requests: does it run?", action="store_true")
    flag("--from", "a table of saved results", dest="saved", nargs="+", metavar="FILE")


def _h200(args: Namespace) -> int:
    from quire.bench.h200 import RunOptions, merged_results, run_suite
    from quire.bench.suite import h200_suite, rehearsal

    suite = h200_suite().select([word for word in (args.rows or "").split(",") if word])
    if args.list:
        print_table(("row", "group", "workload"), [(r.name, r.group, r.title) for r in suite.rows])
        return 0
    if args.saved:
        return _show_h200(args, merged_results([Path(name) for name in args.saved]))
    suite = rehearsal(suite) if args.rehearse else suite
    path = Path(args.out) / "h200.json"
    options = RunOptions(path, args.max_seconds, engine_options(args), note)
    return _show_h200(args, run_suite(suite, options))


def _show_h200(args: Namespace, data: dict[str, Any]) -> int:
    from quire.bench.suite_report import COLUMNS, markdown, mean_line, summary, table_rows

    found, folder = summary(data), Path(args.out)
    _write(folder / "h200.md", markdown(data))
    _draw_roofline(data, folder / "h200.png")
    if not args.json:
        print_table(COLUMNS, table_rows(found))
        print(f"\n{mean_line(found)}\n")
    print_json(found)
    lost = [line["name"] for line in found["rows"] if line["problem"]]
    if lost:
        raise QuireError(
            f"no figure for {', '.join(lost)}: the reasons are in {folder / 'h200.md'}"
        )
    return 0


def _draw_roofline(data: dict[str, Any], path: Path) -> None:
    """A picture where there can be one; where not, why."""
    from quire.bench.roofline_plot import plot_roofline

    try:
        plot_roofline(data, path)
        note(f"saved {path}")
    except (NotSupported, BadRequest) as error:
        note(f"no plot: {error}")


def _roofline_flags(parser: VerbParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="h200.json of one or more runs")
    parser.add_argument("--out", "-o", default="roofline.png", metavar="PNG", help="the picture")


def _roofline(args: Namespace) -> int:
    from quire.bench.h200 import merged_results
    from quire.bench.roofline_plot import plot_roofline, steps_of

    data = merged_results([Path(name) for name in args.files])
    try:
        plot_roofline(data, Path(args.out))
    except OSError as error:
        raise BadRequest(f"cannot write to --out {args.out}: {error.strerror}") from error
    print_json({"what": "roofline", "file": args.out, "steps": len(steps_of(data))})
    return 0


# ---------------------------------------------------------------- profile


def _profile_flags(parser: VerbParser) -> None:
    flag = parser.flag
    flag("--shape", "random weights in the shape of 8b, 0.6b or 14b", metavar="NAME")
    flag("--batches", "of decode steps", type=_counts, default="1,32,256", metavar="N,N")
    flag("--prefill", "lengths of prompts", type=_counts, default="", metavar="N,N")
    flag("--context", "tokens each request has", type=positive, default=256, metavar="N")
    flag("--steps", "decode steps to average", type=positive, default=32, metavar="N")
    flag("--markdown", "Markdown with every kernel's name", action="store_true")
    flag("--out", "also write the JSON here", metavar="FILE")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(",") if part)


def _profile(args: Namespace) -> int:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        llm = _profiled_llm(args, Path(folder))
    from quire.bench.profile import ProfileOptions, Profiler
    from quire.bench.profile_report import COLUMNS, heading, markdown, profile_rows

    profiler = Profiler(llm)
    options = ProfileOptions(args.batches, args.prefill, args.context, args.steps)
    found = profiler.run(options)
    record = {
        "what": "profile",
        "model": args.shape or Path(model_of(args)).name,
        "ceilings": profiler.ceilings._asdict(),
        "steps": [step.as_dict() for step in found],
    }
    if args.out:
        _write(Path(args.out), json.dumps(record, indent=1) + "\n")
    if args.markdown:
        print(markdown(found, profiler.ceilings))
        return 0
    for step in found if not args.json else ():
        print_table(COLUMNS, profile_rows(step), heading(step))
        print()
    print_json(record)
    return 0


def _profiled_llm(args: Namespace, folder: Path) -> LLM:
    from quire.bench.shapes import shape_named, write_shape

    if args.shape is None:
        return open_llm(args, skip_tokenizer_init=True)
    if model_of(args) != "default":
        raise BadRequest(f"got model {model_of(args)!r} and --shape {args.shape!r}; give one")
    from quire.llm import LLM

    shape = write_shape(shape_named(args.shape), folder)
    usual: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": 9216,
        "skip_tokenizer_init": True,
    }
    return LLM(shape, **(usual | engine_options(args)))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error.strerror}") from error


KINDS = {
    "throughput": Kind(
        "many requests at once: tokens per second", THROUGHPUT, _throughput_flags, _throughput
    ),
    "latency": Kind(
        "one request alone: first token and each next", LATENCY, _latency_flags, _latency
    ),
    "startup": Kind("fresh process to first token", STARTUP, _startup_flags, _startup),
    "ladder": Kind("one technique after another on the same work", LADDER, _ladder_flags, _ladder),
    "cpu": Kind("beside other engines on this CPU", CPU, cpu_flags, measure_cpu, has_engine=False),
    "costs": Kind(
        "steps by what is in them, for 'quire simulate'", COSTS, costs_flags, measure_step_costs
    ),
    "serve": Kind("load on a running server", SERVE, serve_flags, measure_serve, "", False),
    "h200": Kind(
        "the suite of one H200, beside vLLM's figures", H200, _h200_flags, _h200, words=""
    ),
    "roofline": Kind(
        "draw what 'h200' measured", ROOFLINE, _roofline_flags, _roofline, "FILE...", False
    ),
    "profile": Kind("time of a step by kernel", PROFILE, _profile_flags, _profile),
}

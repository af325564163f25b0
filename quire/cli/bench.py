"""quire bench: four measurements, each a table and, as the last line, one JSON object."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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

EXAMPLES = """
quire bench throughput --requests 64
quire bench latency --prompt-len 512 --output-len 64
quire bench startup
quire bench ladder --quick
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


class Kind(NamedTuple):
    purpose: str
    examples: str
    add_flags: Callable[[VerbParser], None]
    measure: Callable[[Namespace], int]


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
    parser = VerbParser(f"bench {args.kind}", kind.purpose, kind.examples, "[MODEL]")
    add_model(parser)
    kind.add_flags(parser)
    parser.flag("--json", "the JSON line only", action="store_true")
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


KINDS = {
    "throughput": Kind(
        "many requests at once: tokens per second", THROUGHPUT, _throughput_flags, _throughput
    ),
    "latency": Kind(
        "one request alone: first token and each next", LATENCY, _latency_flags, _latency
    ),
    "startup": Kind("fresh process to first token", STARTUP, _startup_flags, _startup),
    "ladder": Kind("one technique after another on the same work", LADDER, _ladder_flags, _ladder),
}
